"""Tests the TypeScript owner of examples/typescript on the recordings and on a real allocator."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire import Allocator
from quire.hashing import prompt_digests, root_digest
from quire.protocol.state_digest import state_digest

from tests.client.servers import allocator_process
from tests.faults.scene import Proxy

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "build" / "typescript" / "dist"
# The build exits with this status where node, npm or the packages are missing.
NOT_HERE = 3
VOCABULARY = 50_021
PROMPT = [*range(10, 31)]  # five full blocks and one token

pytestmark = pytest.mark.timeout(300)  # The first test waits for npm to install packages.


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    built = subprocess.run([str(ROOT / "scripts" / "typescript.sh")], capture_output=True, text=True, check=False)
    if built.returncode == NOT_HERE:
        pytest.skip(built.stdout.strip() or built.stderr.strip())
    assert built.returncode == 0, built.stdout + built.stderr


class Shell:
    """The engine as a process that answers line by line."""

    def __init__(self, allocator: str, *options: str) -> None:
        command = ["node", str(DIST / "shell.js"), "--allocator", allocator, "--pool", "ts", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **asked: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, **asked: Any) -> dict[str, Any]:
        self.send(**asked)
        return self.read()

    def end(self) -> int:
        """Closes the process's input, so that it gives the pool back; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@contextmanager
def shell_of(allocator: str, *options: str) -> Iterator[Shell]:
    shell = Shell(allocator, *options)
    try:
        yield shell
    finally:
        shell.process.kill()
        shell.process.wait()


@pytest.fixture
def allocator(tmp_path: Path) -> Iterator[str]:
    with allocator_process(tmp_path) as process:
        yield process.address


def text_of(number: int, prompt: list[int], count: int) -> list[int]:
    """Returns the expected text, prompt and answer, as a model without pages computes it."""
    tokens = list(prompt)
    for _ in range(count):
        state = number
        for token in tokens:
            state = (state * 31 + token) % VOCABULARY
        tokens.append(state)
    return tokens


def digests_of(prompt: list[int]) -> list[bytes]:
    return prompt_digests(root_digest(fingerprint=b"toy", layout="tokens"), prompt, 4)


def digest_at(address: str) -> str:
    """Returns the digest of the allocator's state."""
    with Allocator(address) as client:
        rows = [
            (each.sequence_id, each.token_count, each.committed_token_count, each.namespace, map_tables(each.tables))
            for each in client.get_pool_blocks("ts").sequences
        ]
    return state_digest(rows).hex()


def map_tables(tables: Any) -> list[array[int]]:
    return [array("I", [0xFFFFFFFF if block is None else block for block in table]) for table in tables]


def test_it_agrees_with_the_recordings_at_level_1() -> None:
    command = [sys.executable, str(ROOT / "conformance" / "run.py"), "--level", "1", "--"]
    result = subprocess.run(
        [*command, "node", str(DIST / "conformance.js")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == 13


def test_texts_share_their_prefix_and_both_sides_have_the_same_tables(allocator: str) -> None:
    with shell_of(allocator) as shell:
        assert shell.ask(admit=PROMPT) == {"text": 1, "matched": 0}
        assert shell.ask(admit=[*PROMPT, 7]) == {"text": 2, "matched": 20}
        assert shell.ask(admit=PROMPT, namespace="other") == {"text": 3, "matched": 0}
        # Decoding passes step 64. The answer to step 64 has a digest, and the owner compares it with its tables.
        texts = shell.ask(decode=70)["texts"]
        assert texts["1"] == text_of(1, PROMPT, 70)
        assert texts["2"] == text_of(2, [*PROMPT, 7], 70)
        assert texts["3"] == text_of(3, PROMPT, 70)
        assert shell.ask(state=True) == {"digest": digest_at(allocator), "sequences": 3, "opened": 1}
        assert shell.end() == 0
    with Allocator(allocator) as client:
        assert not list(client.list_pools())  # The owner gave its pool back.


def test_a_fork_shares_its_blocks_until_it_writes(allocator: str) -> None:
    with shell_of(allocator) as shell:
        shell.ask(admit=PROMPT)
        shell.ask(decode=2)
        assert shell.ask(fork=1) == {"text": 2}
        before = text_of(1, PROMPT, 2)
        texts = shell.ask(decode=3)["texts"]
        assert texts["1"] == text_of(1, PROMPT, 5)
        assert texts["2"] == text_of(2, before, 3)
        assert shell.ask(state=True)["digest"] == digest_at(allocator)
        assert shell.ask(free=1) == {}
        assert shell.ask(decode=1)["texts"] == {"2": text_of(2, before, 4)}
        assert shell.ask(state=True) == {"digest": digest_at(allocator), "sequences": 1, "opened": 1}


def test_what_is_published_is_matched_by_a_call_by_events_and_by_python(allocator: str) -> None:
    with shell_of(allocator) as shell, Allocator(allocator) as client:
        assert shell.ask(match=PROMPT) == {"matched": 0}
        shell.ask(admit=PROMPT)
        assert shell.ask(match=[*PROMPT, 1, 2, 3]) == {"matched": 20}
        assert shell.ask(mirror=PROMPT, until=20) == {"matched": 20}
        assert [match.matched_token_count for match in client.match_prefix(digests_of(PROMPT))] == [20]
        shell.ask(free=1)
        client.drop_cache("ts")
        assert shell.ask(match=PROMPT) == {"matched": 0}
        # Watchers get the drop with the owner's next step, which this admission causes.
        assert shell.ask(admit=[1, 2, 3])["matched"] == 0
        assert shell.ask(mirror=PROMPT, until=0) == {"matched": 0}


def test_a_pool_without_room_says_how_many_blocks_are_missing_and_goes_on(allocator: str) -> None:
    with shell_of(allocator, "--blocks", "8") as shell:
        assert shell.ask(admit=PROMPT)["matched"] == 0  # The prompt takes six blocks.
        assert shell.ask(admit=[*range(100, 116)])["error"] == "Error: NO_SPACE, 2 blocks are missing"
        assert shell.ask(decode=2)["texts"] == {"1": text_of(1, PROMPT, 2)}
        assert shell.ask(state=True) == {"digest": digest_at(allocator), "sequences": 1, "opened": 1}


def test_texts_go_on_when_the_allocator_is_killed_and_started_anew(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as first:
        address = first.address
        with shell_of(address) as shell:
            shell.ask(admit=PROMPT)
            shell.ask(admit=[*PROMPT, 7])
            shell.ask(decode=3)
            shell.ask(mirror=PROMPT, until=20)
            first.process.kill()
            first.process.wait()
            shell.send(decode=4)  # The owner retries until an allocator answers.
            with allocator_process(tmp_path, "--listen", address):
                texts = shell.read()["texts"]
                assert texts == {"1": text_of(1, PROMPT, 7), "2": text_of(2, [*PROMPT, 7], 7)}
                assert shell.ask(state=True) == {"digest": digest_at(address), "sequences": 2, "opened": 2}
                # The owner has published the blocks again.
                assert shell.ask(admit=[*PROMPT, 9]) == {"text": 3, "matched": 20}
                later = [*range(200, 221)]
                assert shell.ask(admit=later)["matched"] == 0
                assert shell.ask(mirror=later, until=20) == {"matched": 20}  # The watch continues after the kill, too.
                assert shell.end() == 0


def test_an_owner_that_does_nothing_keeps_its_lease(allocator: str) -> None:
    with shell_of(allocator) as shell, Allocator(allocator) as client:
        shell.ask(admit=PROMPT)
        lowest = client.get_pool("ts").lease_remaining_ms
        # The remaining time rises when the owner renews the lease.
        while (left := client.get_pool("ts").lease_remaining_ms) <= lowest:
            lowest = left
        assert shell.ask(state=True)["opened"] == 1


async def test_a_step_whose_answer_is_lost_is_applied_once(allocator: str) -> None:
    proxy = Proxy()
    await proxy.start()
    proxy.target = allocator
    try:
        with shell_of(proxy.address) as shell, Allocator(allocator) as client:
            await asyncio.to_thread(shell.ask, admit=PROMPT)
            before = await asyncio.to_thread(client.get_pool, "ts")
            proxy.swallow_replies()
            shell.send(decode=1)
            async with asyncio.timeout(60):
                while (await asyncio.to_thread(client.get_pool, "ts")).last_step == before.last_step:
                    pass
            proxy.let_through()
            proxy.cut()
            assert (await asyncio.to_thread(shell.read))["texts"] == {"1": text_of(1, PROMPT, 1)}
            after = await asyncio.to_thread(client.get_pool, "ts")
            assert after.last_step == before.last_step + 1
            state = {"digest": digest_at(allocator), "sequences": 1, "opened": 1}
            assert await asyncio.to_thread(shell.ask, state=True) == state
    finally:
        await proxy.stop()


def test_an_owner_waits_until_another_one_gives_the_pool_back(allocator: str) -> None:
    with shell_of(allocator) as first:
        first.ask(admit=PROMPT)
        with shell_of(allocator) as second:
            second.send(admit=PROMPT)
            assert first.ask(state=True)["sequences"] == 1
            assert first.end() == 0
            assert second.read() == {"text": 1, "matched": 0}
