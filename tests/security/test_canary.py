"""No token, prompt, text, key or whole digest appears where it does not belong: in logs, errors or metrics.

Both servers run at log level debug. The test uses them, and makes them refuse everything that they can refuse. Then the
test searches all their output and answers for the secrets.
"""

from __future__ import annotations

import base64
import contextlib
import queue
import ssl
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from quire import Allocator, Client, QuireError, Tls
from quire.hashing import prompt_digests, root_digest
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire_worker.model.tokenizer import Tokenizer

from tests.allocator.service.harness import EMPTY_REPORT, commits, grows, spec
from tests.e2e.stack import DEMO
from tests.security.canaries import Canaries
from tests.security.certificates import Certificates
from tests.security.deployment import TOKEN, Caller, Deployment, deployed

PROMPT = "The canary's secret recipe: seven grains of amber millet, ground by moonlight, and one zinnia petal. " * 3
NAMESPACE = "tenant-canary-d41d8cd9"
WRONG_TOKEN = "canary-guess-0f8e1a77b2"


class Outcome:
    """All output of the deployment, and errors of its callers."""

    def __init__(self) -> None:
        self.canaries = Canaries()
        self.logs: dict[str, bytes] = {}
        self.errors: list[bytes] = []
        self.metrics: dict[str, str] = {}

    def refused(self, call: Callable[[], Any]) -> None:
        """Makes a call that must fail; keeps its error and everything that came with it."""
        with pytest.raises((grpc.RpcError, QuireError)) as caught:
            call()
        error: Any = caught.value
        self.errors.append(str(error).encode())
        if isinstance(error, grpc.RpcError):
            self.errors += [value for _, value in error.trailing_metadata() or () if isinstance(value, bytes)]


@pytest.fixture(scope="module")
def outcome(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("canary")
    certificates.add("poor", "--pool", "none")
    outcome = Outcome()
    with deployed(certificates, folder, "--log-level", "debug", "--log-format", "json") as deployment:
        use(deployment, outcome)
        misuse(deployment, outcome)
        for name, process in (("allocator", deployment.allocator), ("worker", deployment.worker)):
            outcome.metrics[name] = scrape(process.metrics_address, certificates.client())
    for name in ("allocator", "worker"):
        outcome.logs[name] = (folder / f"{name}.log").read_bytes()
    for name in ("server", "worker", "client"):
        key = (certificates.folder / f"{name}.key").read_text()
        outcome.canaries.add_text(f"key of {name}", "".join(key.splitlines()[1:-1]))
    outcome.canaries.add_text("token", TOKEN)
    outcome.canaries.add_text("wrong token", WRONG_TOKEN)
    return outcome


def use(deployment: Deployment, outcome: Outcome) -> None:
    """Sends a prompt twice, so that its blocks are published and hit. Remembers all secrets of these calls."""
    tls = deployment.certificates.client()
    with (
        Client(deployment.worker.address, token=TOKEN, tls=tls) as client,
        Allocator(deployment.allocator.address, token=TOKEN, tls=tls) as allocator,
    ):
        status = client.status()
        for _ in range(2):
            found = client.generate(PROMPT, namespace=NAMESPACE, max_tokens=48, ignore_eos=True)
        assert found.usage.cached_token_count > 0
        tokens = Tokenizer(DEMO).encode(PROMPT)
        root = root_digest(fingerprint=status.model_fingerprint, layout=status.cache_layout, namespace=NAMESPACE)
        digests = prompt_digests(root, tokens, status.block_size)
        assert allocator.match_prefix(digests, NAMESPACE)[0].matched_token_count > 0
        allocator.get_pool_usage("default")
        allocator.get_pool_blocks("default")
        with allocator.watch_events("default") as events:
            outcome.canaries.add_bytes("session id", next(events).session_id)
    outcome.canaries.add_text("prompt", PROMPT)
    outcome.canaries.add_text("text", found.text)
    outcome.canaries.add_tokens("prompt's token ids", tokens)
    outcome.canaries.add_tokens("text's token ids", found.samples[0].token_ids)
    for number, digest in enumerate([root, *digests]):
        outcome.canaries.add_bytes(f"digest {number}", digest)


def misuse(deployment: Deployment, outcome: Outcome) -> None:
    """Makes every kind of refused call, with secrets in it."""
    certificates = deployment.certificates
    everything, poor = certificates.client(), certificates.client("poor")
    tokens = Tokenizer(DEMO).encode(PROMPT)
    for tls, token in ((everything, WRONG_TOKEN), (certificates.client("stranger"), TOKEN), (poor, TOKEN)):
        misuse_worker(deployment.worker.address, tls, token, outcome, tokens)
        caller = Caller(tls, token)
        with caller.channel(deployment.allocator.address) as channel:
            misuse_allocator(pb_grpc.AllocatorServiceStub(channel), caller.metadata, outcome)
    misuse_worker(deployment.worker.address, everything, TOKEN, outcome, tokens, is_let_in=True)
    caller = Caller(everything)
    with caller.channel(deployment.allocator.address) as channel:
        stub = pb_grpc.AllocatorServiceStub(channel)
        misuse_allocator(stub, caller.metadata, outcome, is_let_in=True)
        misuse_stream(stub, caller.metadata, outcome)


def misuse_worker(
    address: str, tls: Tls, token: str, outcome: Outcome, tokens: list[int], *, is_let_in: bool = False
) -> None:
    with Client(address, token=token, tls=tls, timeout_s=20) as client:
        if not is_let_in:
            outcome.refused(lambda: client.generate(PROMPT, namespace=NAMESPACE))
            return
        outcome.refused(lambda: client.generate(PROMPT, namespace=NAMESPACE * 9))
        outcome.refused(lambda: client.generate(PROMPT * 200, namespace=NAMESPACE))
        outcome.refused(lambda: client.generate([*tokens, 1 << 30], namespace=NAMESPACE))
        outcome.refused(lambda: client.generate(PROMPT, namespace=NAMESPACE, temperature=-1.0))
        # The worker refuses this regular expression, because its parenthesis is not closed.
        outcome.refused(lambda: client.generate(PROMPT, namespace=NAMESPACE, regex="("))
        outcome.refused(lambda: client.generate(PROMPT, namespace=NAMESPACE, request_id="r" * 100))
        endless = partial(client.generate, PROMPT, namespace=NAMESPACE, max_tokens=4000, ignore_eos=True)
        outcome.refused(lambda: endless(timeout_s=0.2))


def secret_digests() -> bytes:
    """Returns digests of the prompt under another root, so that no cached block has them."""
    return b"".join(prompt_digests(bytes(32), Tokenizer(DEMO).encode(PROMPT), 4))


def misuse_allocator(stub: Any, metadata: Any, outcome: Outcome, *, is_let_in: bool = False) -> None:
    """Makes refused unary calls. An admitted caller opens a session first."""
    digests = secret_digests()
    outcome.canaries.add_bytes("digest of a refused call", digests[:32])

    def call(method: str, **fields: Any) -> Any:
        return getattr(stub, method)(getattr(pb, f"{method}Request")(**fields), metadata=metadata, timeout=20)

    if not is_let_in:
        outcome.refused(lambda: call("MatchPrefix", digests=digests, namespace=NAMESPACE))
        outcome.refused(lambda: call("OpenSession", version=3, request_id="r", pool="p", spec=spec()))
        return
    wrong = pb.PoolSpec(block_count=8, groups=spec().groups, eviction_policy=PROMPT)
    outcome.refused(lambda: call("OpenSession", version=3, request_id="w", pool="p", spec=wrong))
    session = call("OpenSession", version=3, request_id="r", pool="p", spec=spec()).session_id
    outcome.canaries.add_bytes("unary session id", session)

    def apply(**fields: Any) -> Any:
        return stub.Apply(pb.Step(**{"session_id": session, **fields}), metadata=metadata, timeout=20)

    right, long = grows((1, 8, digests)), grows((2, 4, digests))
    right.namespaces.append(NAMESPACE)
    long.namespaces.append(NAMESPACE * 9)
    apply(number=1, grows=right)
    for fields in (
        {"grows": grows((2, 4, digests[:-1]))},
        {"grows": long},
        {"commits": commits((1, 8, digests))},
        {"commits": commits((1, 4, digests[:33]))},
        {"number": 1},
        {"number": 7},
    ):
        outcome.refused(lambda fields=fields: apply(**{"number": 2, **fields}))  # type: ignore[misc]
    outcome.refused(lambda: call("MatchPrefix", digests=digests[:-1], namespace=NAMESPACE))
    outcome.refused(lambda: apply(session_id=digests[:16]))
    call("CloseSession", session_id=session)


def misuse_stream(stub: Any, metadata: Any, outcome: Outcome) -> None:
    """Sends reports and steps that are refused, each on a stream of its own."""
    digests = secret_digests()
    grow = grows((1, 8, digests))
    grow.namespaces.append(NAMESPACE)
    report = pb.ReportChunk(namespaces=[NAMESPACE])
    report.prefixes.add(namespace=0, digests=digests[:64], blocks=bytes(8))
    unknown = pb.PoolSpec(block_count=8, groups=spec().groups, eviction_policy=PROMPT)
    attach = pb.Attach(version=3, pool="s", incarnation=b"1" * 16, epoch=1, window=1, spec=unknown)
    refused = stub.Session(iter([pb.SessionRequest(attach=attach)]), metadata=metadata, timeout=20)
    outcome.refused(lambda: next(refused))
    for number, step in enumerate(
        (
            pb.Step(
                commits=pb.CommitPhase(
                    sequences=[1],
                    token_counts=[4],
                    digest_counts=[1],
                    digests=digests[:33],
                )
            ),
            pb.Step(grows=grow, commits=pb.CommitPhase(sequences=[1], digests=digests)),
            pb.Step(
                grows=pb.GrowPhase(
                    sequences=[1],
                    token_counts=[4],
                    digests=digests[:33],
                    digest_counts=[9],
                )
            ),
            None,
        )
    ):
        requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        attach = pb.Attach(version=3, pool=f"s{number}", incarnation=b"1" * 16, epoch=1, window=1, spec=spec())
        requests.put(pb.SessionRequest(attach=attach))
        replies = stub.Session(iter(requests.get, None), metadata=metadata, timeout=20)
        assert next(replies).HasField("report_required")
        with contextlib.ExitStack() as undo:
            undo.callback(requests.put, None)
            if step is None:
                requests.put(pb.SessionRequest(report_chunk=report))
                requests.put(pb.SessionRequest(report_end=pb.ReportEnd(chunk_count=1)))
            else:
                requests.put(EMPTY_REPORT)
                step.session_id, step.number = next(replies).ready.session_id, 1
                requests.put(pb.SessionRequest(step=step))
            outcome.refused(lambda replies=replies: next(replies))  # type: ignore[misc]


def scrape(address: str, tls: Tls) -> str:
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(str(tls.cert), str(tls.key))
    request = urllib.request.Request(f"https://{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_the_servers_had_something_to_say(outcome: Outcome) -> None:
    assert b'"session opened"' in outcome.logs["allocator"]
    assert outcome.logs["allocator"].count(b'"call refused"') >= 4
    assert outcome.logs["allocator"].count(b'"stream ended"') >= 4
    assert b'"call refused"' in outcome.logs["worker"]
    assert len(outcome.errors) > 20
    assert "quire_allocator_rpc_total" in outcome.metrics["allocator"]
    assert "quire_worker_tokens_total" in outcome.metrics["worker"]


@pytest.mark.parametrize("server", ["allocator", "worker"])
def test_no_secret_is_logged(outcome: Outcome, server: str) -> None:
    assert outcome.canaries.found_in(outcome.logs[server]) == []
    lines = [line for line in outcome.logs[server].splitlines() if b'"request ended"' not in line]
    assert not any(NAMESPACE.encode() in line for line in lines)


def test_each_request_is_in_the_workers_log_with_its_namespace_and_without_its_text(outcome: Outcome) -> None:
    lines = [line for line in outcome.logs["worker"].splitlines() if b'"request ended"' in line]
    assert sum(NAMESPACE.encode() in line for line in lines) >= 2
    assert any(b'"error": "BAD_PARAMETER"' in line for line in lines)
    assert [outcome.canaries.found_in(line) for line in lines if outcome.canaries.found_in(line)] == []


def test_no_secret_is_in_an_error(outcome: Outcome) -> None:
    assert [outcome.canaries.found_in(error) for error in outcome.errors if outcome.canaries.found_in(error)] == []


@pytest.mark.parametrize("server", ["allocator", "worker"])
def test_no_secret_and_no_tenant_is_in_the_metrics(outcome: Outcome, server: str) -> None:
    assert outcome.canaries.found_in(outcome.metrics[server]) == []
    assert NAMESPACE not in outcome.metrics[server]


# -- tests of the search -----------------------------------------------------------------------------------------------

DIGEST = bytes(range(120, 152))


@pytest.mark.parametrize(
    "line",
    [
        f'{{"event": "x", "prompt": "{PROMPT[40:80]}"}}'.encode(),
        str(list(range(1000, 1010))).encode(),
        b"[" + ",".join(map(str, range(1000, 1010))).encode() + b"]",
        DIGEST,
        DIGEST.hex().upper().encode(),
        base64.b64encode(DIGEST),
        repr(DIGEST).encode(),
        str(pb.MatchPrefixRequest(digests=DIGEST)).encode(),
        str(pb.MatchPrefixRequest(namespace=TOKEN)).encode(),
        f"Bearer {TOKEN}".encode(),
    ],
    ids=["text", "list", "compact list", "raw", "hex", "base64", "repr", "protobuf", "token in protobuf", "header"],
)
def test_a_secret_would_be_found(line: bytes) -> None:
    canaries = Canaries()
    canaries.add_text("prompt", PROMPT)
    canaries.add_text("token", TOKEN)
    canaries.add_tokens("tokens", list(range(1000, 1010)))
    canaries.add_bytes("digest", DIGEST)
    assert len(canaries.found_in(b"before " + line + b" after")) == 1
    assert canaries.found_in(b"nothing of it: canary, 1000, 1001") == []
