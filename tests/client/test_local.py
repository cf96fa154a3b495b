"""Tests servers as child processes: how they start, fail and stop, and that they never outlive their parent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from quire import Allocator, Client, _child, local
from quire._serving.server import DRAIN_S
from quire.errors import UsageError
from quire.local import LocalStack, ServerFailedError, ServerProcess

from tests.client.servers import allocator_process
from tests.e2e.stack import eventually

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def child(folder: Path, script: str) -> ServerProcess:
    """Starts a child process that runs a script instead of a server."""
    (folder / "scripted_child.py").write_text(script)
    return ServerProcess(
        "scripted_child",
        [],
        folder=folder,
        log=folder / "log",
        environment={"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
    )


def test_a_child_that_dies_at_once_is_noticed_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = child(tmp_path, "import sys\nfor i in range(100): print('line', i)\nsys.exit(7)\n")
    with pytest.raises(ServerFailedError, match="exit code 7") as raised:
        process.wait_ready(deadline=time.monotonic() + 30)
    lines = str(raised.value).splitlines()
    assert (lines[1], lines[-1], len(lines)) == ("line 80", "line 99", 21)
    process.stop()


def test_no_file_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("select", "grpc", "quire_allocator"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the current folder was run')")
    (tmp_path / "of_the_server").mkdir()
    monkeypatch.chdir(tmp_path)
    with allocator_process(tmp_path / "of_the_server") as server, Allocator(server.address) as client:
        assert client.health()


def test_whatever_starts_a_python_leaves_the_current_folder_out() -> None:
    root = Path(__file__).resolve().parents[2]
    parts = ("client/quire", "allocator_service", "gateway_service", "worker_service", "integrations/vllm/quire_vllm")
    texts = [path.read_text(encoding="utf-8") for part in parts for path in (root / part).rglob("*.py")]
    started = [found for text in texts for found in re.findall(r"sys\.executable(.{0,20})", text)]
    assert len(started) >= 3
    # "-I" includes "-P", and ignores variables and packages of the user, too.
    assert [each for each in started if not each.startswith((', "-P", "-m"', ', "-I", "-c"'))] == []


@pytest.mark.parametrize("kind", ["link", "folder", "named pipe"])
def test_a_log_is_written_to_no_link_no_folder_and_no_pipe_that_nobody_reads(tmp_path: Path, kind: str) -> None:
    log, elsewhere = tmp_path / "log", tmp_path / "elsewhere"
    {"link": lambda: log.symlink_to(elsewhere), "folder": log.mkdir, "named pipe": lambda: os.mkfifo(log)}[kind]()
    with pytest.raises(UsageError, match=f"^cannot write the log {log}: "):
        ServerProcess("quire_allocator", [], folder=tmp_path, log=log)
    assert not elsewhere.exists()


def test_a_folder_in_the_place_of_a_ready_file_is_named(tmp_path: Path) -> None:
    ready = tmp_path / "quire_allocator.json"
    ready.mkdir()
    with pytest.raises(UsageError, match=f"^cannot replace the ready file {ready}: "):
        ServerProcess("quire_allocator", [], folder=tmp_path)


def test_a_ready_file_of_a_server_that_was_there_before_is_not_believed(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as first:
        pass
    with allocator_process(tmp_path) as second:
        assert second.metrics_address != first.metrics_address


def test_a_child_that_never_serves_is_given_up(tmp_path: Path) -> None:
    process = child(tmp_path, "import threading; threading.Event().wait()")
    with pytest.raises(ServerFailedError, match="did not start to serve in time"):
        process.wait_ready(deadline=time.monotonic() + 0.2)
    process.stop()
    assert process.process.returncode == -signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        "import pathlib, signal, sys, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[-1]).write_text('{}')\n"
        "threading.Event().wait()\n",
    )
    process.wait_ready(deadline=time.monotonic() + 30)
    process.stop(grace_s=0.2)
    assert process.process.returncode == -signal.SIGKILL


def test_who_interrupts_the_wait_for_a_child_has_it_killed(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        "import pathlib, signal, sys, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[-1]).write_text('{}')\n"
        "threading.Event().wait()\n",
    )
    process.wait_ready(deadline=time.monotonic() + 30)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C raises the same exception.
            process.stop()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.process.returncode == -signal.SIGKILL


def test_the_allocator_stops_cleanly(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as process:
        assert process.metrics_address.startswith("127.0.0.1:")
    assert process.process.returncode == 0
    process.stop()  # Stopping twice is no error.


def test_servers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, threading, time\n"
            "from quire.local import ServerProcess\n"
            "arguments = ['--listen', '127.0.0.1:0', '--metrics', '127.0.0.1:0']\n"
            "process = ServerProcess('quire_allocator', arguments, folder=pathlib.Path(sys.argv[1]))\n"
            "process.wait_ready(deadline=time.monotonic() + 30)\n"
            "print(process.process.pid, flush=True)\n"
            "threading.Event().wait()\n",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([orphan], timeout=30)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_stack_serves_text_and_leaves_nothing_behind(tmp_path: Path) -> None:
    said: list[str] = []
    stack = LocalStack(DEMO, worker_arguments=["--blocks", "32"], log_folder=tmp_path, on_progress=said.append)
    with stack:
        with Client(stack.worker_address) as client, Allocator(stack.allocator_address) as allocator:
            assert len(client.generate("The for statement", max_tokens=3).samples[0].token_ids) == 3
            assert [pool.pool for pool in allocator.list_pools()] == ["default"]
        assert stack.poll() is None
    assert stack.worker is not None
    assert stack.allocator is not None
    assert (stack.worker.process.returncode, stack.allocator.process.returncode) == (0, 0)
    assert len(said) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quire_allocator.log", "quire_worker.log"]
    log = (tmp_path / "quire_allocator.log").read_text()
    assert log.index("pool detached") < log.index("draining")  # The worker stopped first and gave its pool back.


def test_a_stack_whose_worker_dies_says_so(tmp_path: Path) -> None:
    with LocalStack(DEMO, worker_arguments=["--blocks", "32"]) as stack:
        assert stack.worker is not None
        stack.worker.process.kill()
        with pytest.raises(ServerFailedError, match="quire_worker was ended by signal 9"):
            stack.wait()


def test_a_stack_whose_allocator_dies_starts_another_one_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with LocalStack(DEMO, worker_arguments=["--blocks", "64"], on_progress=said.append) as stack:
        assert stack.allocator is not None
        assert stack.worker is not None
        address, first = stack.allocator_address, stack.allocator
        waiting = threading.Thread(target=lambda: failures.append(raised_by(stack.wait)))
        failures: list[Exception | None] = []
        waiting.start()
        with Client(stack.worker_address) as client, Allocator(address) as allocator:
            stream = client.stream("The for statement", max_tokens=800, ignore_eos=True)
            next(stream)
            first.process.kill()
            assert sum(len(chunk.token_ids) for chunk in stream) > 700
            eventually(lambda: client.status().allocator_connected and len(said) == 5, "another allocator serves")
            assert said[3:] == [
                "quire_allocator was ended by signal 9; starting another one",
                f"allocator serves on {address}",
            ]
            assert stack.allocator is not first
            assert client.generate("The for", max_tokens=3).usage.output_token_count == 3
            assert [pool.pool for pool in allocator.list_pools()] == ["default"]
        stack.worker.process.kill()
        waiting.join(30)
        assert "quire_worker was ended by signal 9" in str(failures[0])
    assert stack.allocator.process.returncode == 0


def raised_by(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except ServerFailedError as error:
        return error
    return None


def test_a_stack_whose_worker_cannot_start_stops_the_allocator_again(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "nothing")
    with pytest.raises(ServerFailedError, match="quire_worker ended with exit code 2"):
        stack.start()
    assert stack.allocator is not None
    assert stack.allocator.process.returncode == 0


def test_nobody_is_killed_while_it_drains() -> None:
    assert local.DRAIN_S == _child.DRAIN_S == DRAIN_S == 30
    for drain_s, arguments in ((local.DRAIN_S, []), (5.0, ["quire_worker", "--drain-timeout", "5.0"])):
        needed_s = drain_s + 2.0  # time for open calls, and for the work after them
        assert min(local.grace_s(drain_s), _child.kill_s(arguments)) >= 2 * needed_s


@pytest.mark.parametrize("how", ["told to stop", "its parent ends"])
def test_a_worker_with_an_open_stream_and_no_allocator_ends_by_itself(how: str) -> None:
    stack = LocalStack(DEMO, worker_arguments=["--blocks", "32"])
    with stack:
        assert stack.allocator is not None
        assert stack.worker is not None
        stack.allocator.process.send_signal(signal.SIGSTOP)  # From now on the worker waits for the allocator's answer.
        with Client(stack.worker_address) as client, client.stream("The for statement"):
            while not (status := client.status()).waiting_count + status.running_count:
                pass
            stack.allocator.process.kill()
            stack.allocator.process.wait()
            if how == "told to stop":
                stack.worker.stop()
            else:
                assert stack.worker.process.stdin is not None
                stack.worker.process.stdin.close()
                stack.worker.process.wait(60)
    assert stack.worker.process.returncode == 0  # the worker ended by itself; after SIGKILL it would be -9


def test_up_runs_until_it_is_told_to_stop() -> None:
    free = [f"--listen-{name}=127.0.0.1:0" for name in ("allocator", "worker", "gateway")]
    free += [f"--metrics-{name}=127.0.0.1:0" for name in ("allocator", "worker")]
    command = [sys.executable, "-m", "quire.cli", "up", "--model", str(DEMO), *free, "--", "--blocks", "32"]
    command += ["--", "--max-body-bytes", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as lines:
        assert any(line.startswith("Serving.") for line in lines)
        url = next(line.split()[-1] for line in lines if "curl" in line)
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["demo"]
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(url.replace("models", "completions"), b"x" * 1001, timeout=10)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        told = lines.read()
        assert "quire: stopped" in told
        assert "running answers may take 30 s more" in told
        assert "the allocator is away" not in told, "a worker that ends says nothing of the allocator"
    assert len(children) == 3
    assert not any(server.is_running() for server in children)
