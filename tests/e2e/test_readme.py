"""What the README shows works as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quire.local import ServerProcess
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import PoolSession

from tests.e2e.stack import started

ROOT = Path(__file__).resolve().parents[2]


def test_the_python_example_runs_and_prints_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 14
    with started() as stack:
        done = subprocess.run(
            [sys.executable, "-c", example],
            env={
                **os.environ,
                "QUIRE_WORKER": stack.worker_address,
                "QUIRE_ALLOCATOR": stack.allocator_address,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    counts = re.search(r"(\d+) blocks instead of (\d+)\n\d+ blocks stay cached", done.stdout)
    assert counts is not None, done.stdout
    assert 2 * int(counts[1]) < int(counts[2]), "it shows what sharing saves"


def commands() -> list[str]:
    """Each line of the README's shell blocks, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = (line.partition(" #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def test_every_line_of_the_shell_is_run_here_or_by_a_target_that_there_is(tmp_path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Activation is what `sys.executable` stands for; the compose line is run by `make test-compose`.
    elsewhere = {". .venv/bin/activate", 'docker compose exec worker quire generate "The for statement"'}
    by_make = [line for line in commands() if line.startswith("make ")]
    assert {line.split()[1] for line in by_make} <= targets
    here = [line for line in commands() if line not in (*by_make, *elsewhere)]
    up, *others = here
    assert up == "quire up --model models/demo"
    free = [f"--{name}=127.0.0.1:0" for name in ("allocator", "worker", "gateway", "allocator-metrics")]
    arguments = [*up.split()[1:], *free, "--worker-metrics=127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as stack:
        assert stack.stderr is not None
        try:
            said = "".join(iter(stack.stderr.readline, "Ctrl-C stops all.\n"))
            allocator, worker = (
                re.findall(rf"{name} serves on (\S+?);?[\s]", said)[0] for name in ("allocator", "worker")
            )
            gateway = re.findall(r"curl http://(\S+?)/v1", said)[0]
            environment = {**os.environ, "QUIRE_ALLOCATOR": allocator, "QUIRE_WORKER": worker, "COLUMNS": "120"}
            for line in others:
                words = shlex.split(line.replace("127.0.0.1:8000", gateway))
                if words[0] == "quire":
                    words = [sys.executable, "-m", "quire.cli", *words[1:]]
                where = tmp_path if "certs" in words else ROOT
                with subprocess.Popen(words, cwd=where, env=environment, stdout=-1, stderr=-1, text=True) as process:
                    assert process.stdout is not None
                    first = ""
                    if "watch" in words:  # which goes on for ever
                        first = process.stdout.readline()
                        process.send_signal(signal.SIGINT)
                    out, error = process.communicate(timeout=60)
                    out = first + out
                assert out or "certs" in words, (line, error)
                assert process.returncode in ((0, 130) if "watch" in words else (0,)), (line, error)
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(60)


def test_the_demo_runs_and_prints_what_sharing_saved() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py", "--max-tokens", "24"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"│ (\d prompts?, \d \w+) +│ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │", done.stdout)
    assert [row[0] for row in rows] == ["4 prompts, 1 prefix", "1 prompt, 4 samples"]
    for _, tokens, _, prompt, cached, used, separate in rows:
        assert int(tokens) == 96
        assert 0 < int(cached) < int(prompt)
        assert 0 < int(used) < int(separate)
    assert "0 blocks held" in done.stdout


def allocator_process(folder: Path) -> ServerProcess:
    """An allocator behind the same socket as the one before it."""
    arguments = ["--listen", f"unix://{folder}/socket", "--metrics", "127.0.0.1:0"]
    allocator = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
    allocator.wait_ready(deadline=time.monotonic() + 30)
    return allocator


def test_an_engine_of_ones_own_decodes_on_while_its_allocator_is_dead(tmp_path: Path) -> None:
    allocator = allocator_process(tmp_path)
    command = [sys.executable, "examples/own_engine.py"]
    environment = {**os.environ, "QUIRE_ALLOCATOR": f"unix://{tmp_path}/socket"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        first = [engine.stdout.readline() for _ in range(4)]
        assert "".join(first).count("32 of 41 tokens were in the pages") == 3
        allocator.process.kill()
        allocator.stop()
        successor = allocator_process(tmp_path)
        last, _ = engine.communicate(timeout=100)
        successor.stop()
    assert engine.returncode == 0
    alone = re.search(r"(\d+) tokens were computed without an allocator; (\d+) allocators were told of them", last)
    assert alone is not None
    assert int(alone[1]) > 0
    assert int(alone[2]) == 2
    assert "all 5 texts are those that are computed without pages" in last


async def test_an_engine_of_ones_own_is_right_when_every_answer_is_there_before_it_computes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submit = PoolSession.submit

    async def answered(session: PoolSession, step: StepBuilder) -> asyncio.Future[StepOutcome]:
        answer = await submit(session, step)
        await asyncio.wait([answer])
        return answer

    monkeypatch.setattr(PoolSession, "submit", answered)
    monkeypatch.setenv("QUIRE_ALLOCATOR", f"unix://{tmp_path}/socket")
    allocator = await asyncio.to_thread(allocator_process, tmp_path)
    await runpy.run_path(str(ROOT / "examples" / "own_engine.py"))["main"]()
    allocator.stop()
    assert "all 5 texts are those that are computed without pages" in capsys.readouterr().out
