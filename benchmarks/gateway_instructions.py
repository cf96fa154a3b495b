"""Instructions per request in the gateway's process, by callgrind. `--before FOLDER` compares with another checkout.

Times on a noisy machine hide changes of a few per cent; this count shows them. Each checkout serves with its own
gateway, worker and allocator. Only the gateway runs under callgrind. A request's count is the mean of many requests on
one connection. The demo model answers. Gateways that can log each request do not log here. Both checkouts use this
Python's packages.

The script needs valgrind and a C compiler, and takes one or two minutes per checkout. To compare with a commit:

    git worktree add /tmp/before COMMIT
    python benchmarks/gateway_instructions.py --before /tmp/before
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from report import Goal, add_output_arguments, publish

ROOT: Final = Path(__file__).resolve().parent.parent
SIDES: Final = Path(__file__).resolve().parent / "instructions_sides"
PARTS: Final = ("client", "allocator_service", "gateway_service", "worker_service")
START_S: Final = 180.0  # seconds for the gateway to start under callgrind
WARM: Final = 30  # number of requests before the counted requests
OVER_MAX: Final = 1.02
# A script that serves until its standard input ends.
STACK: Final = (
    "import sys; from quire.local import LocalStack\n"
    "with LocalStack(sys.argv[1]) as stack: print(stack.worker_address, flush=True); sys.stdin.read()"
)
CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
COMPLETION: Final = {"model": "demo", "prompt": "The for statement", "max_tokens": 1, "temperature": 0}


def post(path: str, body: object) -> bytes:
    """Returns the bytes of a POST request with a JSON body."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return f"{head}\r\n\r\n".encode() + text


REQUESTS: Final = {
    "GET /v1/models": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a body with a wrong field": post("/v1/completions", {**COMPLETION, "temperature": "warm"}),
    "a completion of one token": post("/v1/completions", COMPLETION),
    "a chat of one token": post("/v1/chat/completions", CHAT),
    "a stream of one token": post("/v1/completions", {**COMPLETION, "stream": True}),
}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="FOLDER", type=Path, help="checkout to compare with")
    parser.add_argument(
        "--requests", type=int, default=200, help="counted requests of each kind (default: %(default)s)"
    )
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.requests < 1:
        parser.error("--requests is at least 1")
    return options


@contextmanager
def worker(root: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serves the demo model with a checkout's code, and yields the worker's address."""
    command = [sys.executable, "-c", STACK, str(root / "models" / "demo")]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as stack:
        assert stack.stdin is not None
        assert stack.stdout is not None
        try:
            yield stack.stdout.readline().strip()
        finally:
            stack.stdin.close()


class Counted:
    """A gateway under callgrind, and one connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], answers: int, address: str) -> None:
        self._process, self._answers = process, answers
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=60)

    def ask(self, request: bytes, count: int, is_counted: bool) -> None:
        """Sends a request `count` times, each after the previous answer."""
        if is_counted:
            self._tell(signal.SIGUSR1)
        for _ in range(count):
            self._connection.sendall(request)
            self._answer()
        if is_counted:
            self._tell(signal.SIGUSR2)

    def _tell(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if not os.read(self._answers, 1):
            raise RuntimeError("the gateway has ended")

    def _answer(self) -> None:
        """Reads one answer to its end, which its length or its last chunk marks."""
        read = b""
        while True:
            part = self._connection.recv(65_536)
            if not part:
                raise RuntimeError(f"the gateway closed the connection after {read[:200]!r}")
            read += part
            head, end, body = read.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            if end and (len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")):
                return


def count(root: Path, request_count: int) -> dict[str, float]:
    """Returns the number of instructions of each kind of request, in the gateway of a checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / part) for part in PARTS)}
    environment |= {"PYTHONHASHSEED": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="quire-")))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/counter.so", str(SIDES / "counter.c")],
                       check=True)  # fmt: skip
        answers, said = os.pipe()
        cleanup.callback(os.close, answers)
        address = cleanup.enter_context(worker(root, environment))
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        command += [sys.executable, str(SIDES / "served.py"), f"{folder}/counter.so", str(said)]
        command += ["--worker", address, "--listen", "127.0.0.1:0", "--ready-file", f"{folder}/ready"]
        if (root / "client/quire/_serving/request_log.py").exists():
            command += ["--log-requests", "none"]
        log = cleanup.enter_context((folder / "log").open("wb"))
        gateway = subprocess.Popen(command, env=environment, pass_fds=[said], stdout=log, stderr=log)
        os.close(said)
        cleanup.callback(gateway.wait)
        cleanup.callback(gateway.kill)
        wait_ready(gateway, folder)
        counted = Counted(gateway, answers, json.loads((folder / "ready").read_text())["address"])
        for request in REQUESTS.values():
            counted.ask(request, WARM, is_counted=False)
        for request in REQUESTS.values():
            counted.ask(request, request_count, is_counted=True)
        totals = {}
        for file in folder.glob("counts.*"):
            text = file.read_text(encoding="utf-8")
            number = re.search(r"^desc: Trigger: Client Request: (\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if number and total:
                totals[int(number[1])] = int(total[1])
    return {name: round(totals[number] / request_count, 1) for number, name in enumerate(REQUESTS)}


def wait_ready(gateway: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until a gateway serves.

    Raises:
        RuntimeError: the gateway has ended, or does not serve in time.
    """
    deadline_s = time.monotonic() + START_S
    while not (folder / "ready").exists():
        try:
            gateway.wait(0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline_s:
                continue
        raise RuntimeError(
            f"the gateway did not start to serve:\n{(folder / 'log').read_text(errors='replace')[-4_000:]}"
        )


def main() -> None:
    """Counts, and prints or writes the result."""
    options = arguments()
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        sys.exit("not run: valgrind or a C compiler is not installed")
    now = count(ROOT, options.requests)
    before = count(options.before.resolve(), options.requests) if options.before else {}
    rows: list[dict[str, object]] = []
    goals = []
    for name, instructions in now.items():
        row: dict[str, object] = {"request": name, "instructions": round(instructions)}
        if options.before:
            over = instructions / before[name]
            row |= {"before": round(before[name]), "over_before": f"{over:.3f}"}
            goals.append(Goal(f"{name}: instructions over before", over, OVER_MAX, "lower"))
        rows.append(row)
    publish("Instructions of a request in the gateway", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
