"""Two gateways without any list of workers, in front of two workers of one allocator: real processes, some killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from quire import Allocator, Client
from quire.events import BlocksStored
from quire.local import ServerProcess

from tests.client.servers import allocator_process
from tests.e2e.stack import DEMO, eventually, server
from tests.faults.scene import Proxy
from tests.gateway.scene import client, gateway

# Ten blocks. The prompt is a list of tokens, so no worker has to tokenize it.
PROMPT = [*range(100, 260)]
WITHIN_S = 60.0
pytestmark = pytest.mark.timeout(300)  # Each test starts five processes or more.
ROUTES = "quire_gateway_routes_total"
ABOUT_LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 1_500, "extra_body": {"ignore_eos": True}}


class Fleet(NamedTuple):
    """The processes. `workers` has each worker by its pool's name."""

    allocator: ServerProcess
    workers: dict[str, ServerProcess]
    gateways: tuple[ServerProcess, ServerProcess]

    def ask(self, number: int, prompt: list[int]) -> Any:
        """Asks a gateway for a greedy answer."""
        asked = client(self.gateways[number]).completions
        return asked.create(model="demo", prompt=prompt, max_tokens=4, temperature=0)

    def samples(self, name: str, label: str) -> list[float]:
        """Returns each gateway's sample of a metric; 0 where the gateway has none."""
        found = (samples_of(f"http://{each.address}/metrics") for each in self.gateways)
        return [each.get(f"{name}{label}", 0.0) for each in found]

    def sent_to(self, pool: str) -> float:
        """Returns how many prompts both gateways have sent to a worker."""
        return sum(self.samples("quire_gateway_worker_requests_total", self.label(pool)))

    def ready(self, pool: str) -> list[float]:
        """Returns for each gateway whether a worker answers it."""
        return self.samples("quire_gateway_worker_ready", self.label(pool).replace("{", '{model="demo",'))

    def label(self, pool: str) -> str:
        """Returns the label of a worker."""
        return f'{{worker="{self.workers[pool].address}"}}'


def samples_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def worker(stack: ExitStack, folder: Path, allocator: str, pool: str) -> ServerProcess:
    arguments = ["--model", str(DEMO), "--allocator", allocator, "--listen", "127.0.0.1:0", "--blocks", "256"]
    return stack.enter_context(server("quire_worker", *arguments, "--pool", pool, folder=folder / pool))


@contextmanager
def processes(folder: Path) -> Iterator[tuple[ServerProcess, dict[str, ServerProcess]]]:
    """Runs an allocator and its workers."""
    with ExitStack() as stack:
        allocator = stack.enter_context(allocator_process(folder, "--check-invariants"))
        yield allocator, {pool: worker(stack, folder, allocator.address, pool) for pool in ("a", "b")}


@contextmanager
def gateways(folder: Path, allocator: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        gateway(folder / "one", "--allocator", allocator) as one,
        gateway(folder / "two", "--allocator", allocator) as two,
    ):
        yield one, two


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    with processes(folder) as (allocator, workers), gateways(folder, allocator.address) as both:
        yield Fleet(allocator, workers, both)


def test_two_gateways_route_as_one_and_another_worker_answers_for_a_killed_one(tmp_path: Path) -> None:
    with fleet(tmp_path) as here, ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        for pool in here.workers:
            assert here.ready(pool) == [1, 1]
        first = here.ask(0, PROMPT)
        pool, other = sorted(here.workers, key=here.sent_to, reverse=True)
        # Both gateways send the prompt to the worker that got the prefix from the first gateway.
        for number in range(4):
            answer = here.ask(number % 2, [*PROMPT, 300 + number])
            assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT)
        assert (here.sent_to(pool), here.sent_to(other)) == (5, 0)
        assert here.samples(ROUTES, '{by="allocator"}') == [3, 2]
        ends = samples_of(f"http://{here.allocator.metrics_address}/metrics")
        assert ends['quire_allocator_reservations_total{end="taken"}'] == 5, "the workers took the reservations"

        process = here.workers[pool].process
        process.send_signal(signal.SIGSTOP)
        asked: Future[Any] = threads.submit(here.ask, 1, PROMPT)
        eventually(lambda: here.sent_to(pool) == 6, "the worker has the prompt", within_s=WITHIN_S)
        process.kill()
        assert asked.result(timeout=WITHIN_S).choices[0].text == first.choices[0].text
        assert here.sent_to(other) == 1
        assert here.samples("quire_gateway_reservations_lost_total", "") == [0, 1]

        old = here.label(pool)
        here.workers["c"] = worker(stack, tmp_path, here.allocator.address, "c")
        eventually(lambda: here.ready("c") == [1, 1], "the new worker is found", within_s=WITHIN_S)
        texts = [each.address for each in here.gateways]
        gone = lambda: not any(old in str(samples_of(f"http://{each}/metrics")) for each in texts)  # noqa: E731
        eventually(gone, "the killed worker is forgotten", within_s=WITHIN_S)
        assert here.ask(0, PROMPT).choices[0].text == first.choices[0].text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
def test_a_stream_whose_worker_is_killed_goes_on_at_another_one(tmp_path: Path, sampling: dict[str, Any]) -> None:
    with fleet(tmp_path) as here:
        about: dict[str, Any] = {**ABOUT_LONG, **sampling}
        ai = client(here.gateways[0])
        whole = ai.completions.create(**about)
        before = {pool: here.sent_to(pool) for pool in here.workers}
        texts, finish = list[str](), list[str]()
        with ai.completions.create(**about, stream=True) as pieces:
            for piece in pieces:
                if not texts:
                    (pool,) = [each for each in here.workers if here.sent_to(each) > before[each]]
                    here.workers[pool].process.kill()
                texts.append(piece.choices[0].text)
                finish += [piece.choices[0].finish_reason] * (piece.choices[0].finish_reason is not None)
        assert "".join(texts) == whole.choices[0].text
        assert finish == ["length"]
        assert here.samples("quire_gateway_resumes_total", '{result="continued"}') == [1, 0]
        (other,) = [each for each in here.workers if each != pool]
        with Allocator(here.allocator.address) as pools:
            eventually(lambda: pools.get_pool(other).held_block_count == 0, "nothing is held", within_s=WITHIN_S)


async def test_mirrors_decide_while_the_allocator_is_silent(tmp_path: Path) -> None:
    """The gateways lose the allocator, and the workers keep it."""
    proxy = Proxy()
    await proxy.start()
    try:
        with processes(tmp_path) as (allocator, workers):
            proxy.target = allocator.address
            await asyncio.to_thread(warmed, allocator, workers["b"])
            with gateways(tmp_path, proxy.address) as both:
                here = Fleet(allocator, workers, both)
                known = ("quire_gateway_worker_watched", here.label("b"))
                ages = ("quire_gateway_mirror_age_seconds", here.label("b"))
                await until(lambda: here.samples(*known) == [1, 1], "its pool is mirrored")
                proxy.swallow()
                for number in range(4):
                    answer = await asyncio.to_thread(here.ask, number % 2, [*PROMPT, 300 + number])
                    assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT)
                assert await asyncio.to_thread(here.sent_to, "a") == 0
                assert await asyncio.to_thread(here.samples, ROUTES, '{by="mirror"}') == [2, 2]
                await until(lambda: min(here.samples(*ages)) > 6, "the mirrors say that they age")
                proxy.let_through()

                def routes_again() -> bool:
                    here.ask(0, PROMPT)
                    return here.samples(ROUTES, '{by="allocator"}')[0] > 0

                await until(routes_again, "the allocator routes again")
                await until(lambda: max(here.samples(*ages)) < 6, "the mirrors are young again")
    finally:
        await proxy.stop()


async def until(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(functools.partial(eventually, holds, what, within_s=WITHIN_S))


def warmed(allocator: ServerProcess, warm: ServerProcess) -> None:
    """Computes the prompt at a worker, and waits until watchers of its pool hear of it."""
    with Client(warm.address) as direct:
        direct.generate(PROMPT, max_tokens=20)
    told = 0
    with Allocator(allocator.address) as pools:
        for event in pools.watch_events("b"):
            told += len(event.digests) if isinstance(event, BlocksStored) else 0
            if told >= len(PROMPT) // 16:
                return


def told(answer: Future[Any]) -> str | int:
    """Returns the text of an answer, or the status of the refusal."""
    try:
        return str(answer.result(timeout=WITHIN_S).choices[0].text)
    except openai.APIStatusError as error:
        return error.status_code


def test_a_killed_allocator_is_waited_for_and_routes_again(tmp_path: Path) -> None:
    with fleet(tmp_path) as here, ThreadPoolExecutor(4) as threads:
        first = here.ask(0, PROMPT).choices[0].text
        here.allocator.process.kill()
        here.allocator.process.wait()
        asked = [threads.submit(here.ask, number % 2, PROMPT) for number in range(4)]
        (tmp_path / "again").mkdir()
        with allocator_process(tmp_path / "again", "--listen", here.allocator.address):
            for answer in asked:
                assert told(answer) in {first, 503}, "workers refuse once they have noticed"

            def routes_again() -> bool:
                with contextlib.suppress(openai.InternalServerError):
                    assert here.ask(0, PROMPT).choices[0].text == first
                return here.samples(ROUTES, '{by="allocator"}')[0] > 1

            eventually(routes_again, "the allocator routes again", within_s=WITHIN_S)
