"""Work beside the event loop respects its limits, runs in order, and does not delay the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from quire.errors import QuireError, Reason
from quire_worker.aside.job_processes import JobLimits, JobProcesses, OverLimitError
from quire_worker.aside.threads import Threads
from quire_worker.calls.structures import StructureCompiler
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.params import Structure, StructureKind

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "default": "{% if messages[0].role == 'loop' %}" + FOR_EVER + "{% elif messages[0].role == 'grow' %}"
    "{{ (messages[0].content * 1000000000)|length }}{% else %}{{ messages[0].content }}{% endif %}"
}  # fmt: skip


def job(role: str, content: str = "hello") -> dict[str, object]:
    message = {"role": role, "content": content}
    return {"messages": [message], "tools": [], "variables": {}, "with_generation_prompt": True}


@pytest.fixture
async def processes() -> AsyncIterator[JobProcesses]:
    limits = JobLimits(memory_bytes=64 << 20, cpu_s=1, wall_s=60)
    processes = JobProcesses("templates", lambda: {"templates": TEMPLATES, "variables": {}}, limits)
    yield processes
    processes.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["loop", "grow"])
async def test_a_job_over_its_limits_ends_and_the_next_one_is_done(processes: JobProcesses, role: str) -> None:
    for _ in range(2):
        with pytest.raises(OverLimitError):
            await processes.run(job(role), key="a", timeout_s=60)
        assert await processes.run(job("user"), key="a", timeout_s=60) == {"text": "hello"}


@pytest.mark.timeout(120)
async def test_a_key_has_one_job_at_a_time_and_others_are_done_meanwhile(processes: JobProcesses) -> None:
    await processes.warm()
    bad = [asyncio.create_task(processes.run(job("loop"), key="bad", timeout_s=60)) for _ in range(3)]
    for number in range(20):
        found = await processes.run(job("user", str(number)), key=f"good {number}", timeout_s=60)
        assert found == {"text": str(number)}
    assert not bad[-1].done(), "they are done one after another"
    for task in bad:
        with pytest.raises(OverLimitError):
            await task


@pytest.mark.timeout(120)
async def test_a_caller_that_leaves_does_not_give_its_turn_to_another(processes: JobProcesses) -> None:
    await processes.warm()
    with pytest.raises(TimeoutError):
        await processes.run(job("loop"), key="bad", timeout_s=0.1)
    with pytest.raises(TimeoutError):
        await processes.run(job("user"), key="bad", timeout_s=0.1)
    assert await processes.run(job("user"), key="good", timeout_s=60) == {"text": "hello"}
    assert await processes.run(job("user"), key="bad", timeout_s=60) == {"text": "hello"}


@pytest.mark.timeout(120)
async def test_a_process_that_was_killed_is_started_again(processes: JobProcesses) -> None:
    assert await processes.run(job("user"), key="a", timeout_s=60) == {"text": "hello"}
    assert processes._process is not None
    processes._process.kill()
    processes._process.wait()
    assert await processes.run(job("user"), key="a", timeout_s=60) == {"text": "hello"}, "a child lives on"
    with pytest.raises(OverLimitError):
        await processes.run(job("loop"), key="a", timeout_s=60)
    assert await processes.run(job("user"), key="a", timeout_s=60) == {"text": "hello"}


@pytest.mark.timeout(120)
async def test_closing_ends_the_processes(processes: JobProcesses) -> None:
    running = asyncio.create_task(processes.run(job("loop"), key="a", timeout_s=60))
    await processes.warm()
    process = processes._process
    assert process is not None
    processes.close()
    assert process.poll() is not None
    with pytest.raises((asyncio.CancelledError, OverLimitError, OSError)):
        await running


async def test_threads_answer_raise_and_refuse_what_is_too_much() -> None:
    threads, gate = Threads("tested", 1, 2), threading.Event()
    waiting = [asyncio.create_task(threads.run(gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QuireError, match=r"calls wait to be tested \(2\)") as raised:
        await threads.run(len, "")
    assert raised.value.reason is Reason.QUEUE_FULL
    waiting[1].cancel()
    gate.set()
    assert await waiting[0] is True
    assert await waiting[2] is True
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(len, "abc") == 3


def test_the_interpreter_does_not_wait_for_such_a_thread() -> None:
    program = """
import asyncio, threading
from quire_worker.aside.threads import Threads
async def main():
    task = asyncio.create_task(Threads("stuck", 1, 1).run(threading.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def structure(text: str) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, (text,))


@pytest.mark.timeout(120)
async def test_what_would_crash_or_grow_is_refused_and_what_is_kept_is_known() -> None:
    compiler = StructureCompiler(Tokenizer(DEMO), 2048, [0])
    try:
        first = await compiler.compile(structure('{"type": "integer"}'), "")
        assert await compiler.compile(structure('{"type": "integer"}'), "") is not first
        with pytest.raises(QuireError, match="it allows no text") as raised:
            await compiler.compile(Structure(StructureKind.REGEX, (r"[^\x00-\U0010ffff]",)), "")
        assert raised.value.reason is Reason.BAD_PARAMETER
    finally:
        compiler.close()
