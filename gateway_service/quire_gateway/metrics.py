"""Metrics of the gateway, and the collector that Prometheus reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.logs import dropped_lines
from quire._serving.metrics import Histogram

from quire_gateway.entries import Entry
from quire_gateway.fleet import Fleet
from quire_gateway.replies import Taken

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
METRIC_NAMES: Final = frozenset(
    {
        "quire_gateway_requests_total",
        "quire_gateway_in_flight",
        "quire_gateway_callers_left_total",
        "quire_gateway_tokens_total",
        "quire_gateway_continued_responses_total",
        "quire_gateway_stored_responses",
        "quire_gateway_stored_response_bytes",
        "quire_gateway_first_token_seconds",
        "quire_gateway_request_seconds",
        "quire_gateway_worker_ready",
        "quire_gateway_worker_requests_total",
        "quire_gateway_worker_load",
        "quire_gateway_worker_watched",
        "quire_gateway_key_requests_total",
        "quire_gateway_mirror_age_seconds",
        "quire_gateway_allocator_ready",
        "quire_gateway_routes_total",
        "quire_gateway_reservations_lost_total",
        "quire_gateway_resumes_total",
        "quire_gateway_key_tokens_total",
        "quire_gateway_key_errors_total",
        "quire_gateway_retries_total",
        "quire_gateway_log_lines_dropped_total",
    }
)
KEYS_SHOWN: Final = 20
OTHER: Final = "other"
TAIL: Final = "tail"
MORE: Final = "more"
_KINDS: Final = ("prompt", "cached", "output")


class Telemetry:
    """Counters of the gateway. Plain integers, used only on the event loop.

    Attributes:
        answers: number of answers, by route and status.
        in_flight: requests that are being answered.
        left_count: callers that closed their connection before their answer was complete.
        first_token: seconds to the first piece of a text.
        whole: seconds to the end of an answer.
        taken: the tokens of all answers.
        entries: the requests that are being answered, oldest first.
        by_key: number of requests and of tokens of each kind, by model and name of the key.
        errors_by_key: number of requests that ended with an error, by name of the key and code of the error.
        retries: number of requests for which another worker was asked after a refusal, by model.
        continued: number of responses that continue another one. `TAIL` counts responses that computed at most a block
            more than their own new tokens, `MORE` all others.
        stored_count: number of stored responses.
        stored_bytes: bytes of the stored responses.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.in_flight = 0
        self.left_count = 0
        self.first_token = Histogram(_SECONDS)
        self.whole = Histogram(_SECONDS)
        self.taken = Taken()
        self.continued: Counter[str] = Counter({TAIL: 0, MORE: 0})
        self.stored_count = 0
        self.stored_bytes = 0
        self.entries: dict[Entry, None] = {}
        self.by_key: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * (1 + len(_KINDS)))
        self.errors_by_key: Counter[tuple[str, str]] = Counter()
        self.retries: Counter[str] = Counter()

    def note(self, entry: Entry) -> None:
        """Counts a request that has ended. The entry has no model if the request was refused before its model was
        known.
        """
        if entry.model:
            counts = self.by_key[entry.model, entry.key]
            for place, count in enumerate((1, entry.prompt_tokens, entry.cached_tokens, entry.output_tokens)):
                counts[place] += count
        if entry.error:
            self.errors_by_key[entry.key, entry.error] += 1
        if entry.retry_count:
            self.retries[entry.model] += entry.retry_count


class GatewayCollector(Collector):
    """Reads the numbers when Prometheus asks for them. Labels: route, status, and the addresses of the workers."""

    def __init__(self, telemetry: Telemetry, fleet: Fleet) -> None:
        self._telemetry = telemetry
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Yields each family of `METRIC_NAMES`."""
        numbers = self._telemetry
        answers = CounterMetricFamily(
            "quire_gateway_requests", "Requests that were answered.", labels=("route", "code")
        )
        for (route, status), count in sorted(numbers.answers.items()):
            answers.add_metric((route, str(status)), count)
        yield answers
        yield GaugeMetricFamily("quire_gateway_in_flight", "Requests that are being answered.", numbers.in_flight)
        yield CounterMetricFamily(
            "quire_gateway_callers_left",
            "Callers that disconnected before their answer was complete.",
            numbers.left_count,
        )
        tokens = CounterMetricFamily("quire_gateway_tokens", "Tokens of all answers.", labels=("kind",))
        for kind, count in zip(_KINDS, numbers.taken[:3], strict=True):
            tokens.add_metric((kind,), count)
        yield tokens
        yield from self._by_key()
        yield self._errors_by_key()
        retries = CounterMetricFamily(
            "quire_gateway_retries",
            "Requests that were sent to a second worker because the first refused.",
            labels=("model",),
        )
        models = {backend.status.model: 0 for backend in self._fleet.backends if backend.status is not None}
        for model, count in sorted({**models, **numbers.retries}.items()):
            retries.add_metric((model,), count)
        yield retries
        yield from _of_responses(numbers)
        for name, text, histogram in (
            ("first_token", "Seconds from a request to the first piece of its text.", numbers.first_token),
            ("request", "Seconds from a request to the end of its answer.", numbers.whole),
        ):
            family = HistogramMetricFamily(f"quire_gateway_{name}_seconds", text)
            family.add_metric((), histogram.buckets(), histogram.sum)
            yield family
        ready = GaugeMetricFamily(
            "quire_gateway_worker_ready",
            "Whether a worker answers, with the model of its latest answer.",
            labels=("worker", "model"),
        )
        chosen = CounterMetricFamily("quire_gateway_worker_requests", "Prompts sent to a worker.", labels=("worker",))
        watched = GaugeMetricFamily(
            "quire_gateway_worker_watched",
            "Whether the gateway knows which blocks a worker's pool has cached.",
            labels=("worker",),
        )
        load = GaugeMetricFamily("quire_gateway_worker_load", "Requests that a worker has.", labels=("worker",))
        for backend in self._fleet.backends:
            address = (backend.client.address,)
            model = "" if backend.status is None else backend.status.model
            ready.add_metric((*address, model), float(backend.is_ready))
            chosen.add_metric(address, backend.chosen_count)
            load.add_metric(address, backend.load)
            watched.add_metric(address, float(backend.is_mirrored))
        yield from (ready, chosen, load, watched)
        yield from self._of_routing()
        yield dropped_lines("quire_gateway")

    def _of_routing(self) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "quire_gateway_mirror_age_seconds",
            "Seconds since the allocator's last message on a worker's pool, one every 5 s; 0 if the pool is not known.",
            labels=("worker",),
        )
        for backend in self._fleet.backends:
            age.add_metric((backend.client.address,), backend.mirror_age_s)
        answers = GaugeMetricFamily(
            "quire_gateway_allocator_ready",
            "Whether an allocator answered when it was last asked for its workers or for a route; 0 if never asked.",
            labels=("allocator",),
        )
        for known in self._fleet.discovery.known:
            answers.add_metric((known.allocator.address,), float(known.is_ready))
        routes = CounterMetricFamily(
            "quire_gateway_routes",
            "Prompts by what chose their worker: the allocator, the gateway's mirrors and load, or no other worker.",
            labels=("by",),
        )
        for by, count in self._fleet.routes.items():
            routes.add_metric((by,), count)
        resumes = CounterMetricFamily(
            "quire_gateway_resumes",
            "Answers whose worker ended, by what the next worker did: continued the text, or diverged from it.",
            labels=("result",),
        )
        for result, count in self._fleet.resumes.items():
            resumes.add_metric((result,), count)
        yield from (age, answers, routes, resumes)
        yield CounterMetricFamily(
            "quire_gateway_reservations_lost",
            "Reservations whose worker refused the prompt or ended before its first token.",
            self._fleet.lost_reservation_count,
        )

    def _by_key(self) -> Iterator[Metric]:
        """Yields the use of keys: of the `KEYS_SHOWN` names with most requests, and of all others together."""
        counts = {each: list(count) for each, count in self._telemetry.by_key.items()}
        of_name = Counter[str]()
        for (_, name), count in counts.items():
            of_name[name] += count[0]
        shown = {name for name, _ in of_name.most_common(KEYS_SHOWN)}
        added: dict[tuple[str, str], list[int]] = {}
        for (model, name), count in sorted(counts.items()):
            label = model, name if name in shown else OTHER
            added[label] = [sum(pair) for pair in zip(added.get(label, [0] * len(count)), count, strict=True)]
        requests = CounterMetricFamily(
            "quire_gateway_key_requests", "Ended requests, by name of their key.", labels=("model", "key")
        )
        tokens = CounterMetricFamily(
            "quire_gateway_key_tokens", "Tokens, by name of their key.", labels=("model", "key", "kind")
        )
        for label, (request_count, *of_kinds) in added.items():
            requests.add_metric(label, request_count)
            for kind, token_count in zip(_KINDS, of_kinds, strict=True):
                tokens.add_metric((*label, kind), token_count)
        yield from (requests, tokens)

    def _errors_by_key(self) -> Metric:
        """Returns the errors of the `KEYS_SHOWN` names with most errors, and of all others together."""
        counts = self._telemetry.errors_by_key
        of_name = Counter[str]()
        for (name, _), count in counts.items():
            of_name[name] += count
        shown = {name for name, _ in of_name.most_common(KEYS_SHOWN)}
        added = Counter[tuple[str, str]]()
        for (name, error), count in counts.items():
            added[name if name in shown else OTHER, error] += count
        errors = CounterMetricFamily(
            "quire_gateway_key_errors",
            "Requests that ended with an error, by name of their key and error code.",
            labels=("key", "error"),
        )
        for label, count in sorted(added.items()):
            errors.add_metric(label, count)
        return errors


def _of_responses(numbers: Telemetry) -> Iterator[Metric]:
    continued = CounterMetricFamily(
        "quire_gateway_continued_responses",
        "Responses that continue another one, by whether they computed more than their new tokens and one block.",
        labels=("computed",),
    )
    for computed, count in sorted(numbers.continued.items()):
        continued.add_metric((computed,), count)
    yield continued
    yield GaugeMetricFamily("quire_gateway_stored_responses", "Responses that are kept.", numbers.stored_count)
    yield GaugeMetricFamily("quire_gateway_stored_response_bytes", "Bytes of kept responses.", numbers.stored_bytes)
