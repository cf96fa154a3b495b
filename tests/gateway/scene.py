"""Runs gateways as processes, in front of real or scripted workers."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
from quire.local import ServerProcess
from quire.v1 import worker_pb2 as pb

from tests.client.servers import ScriptedServer, two_samples

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
STATUS = pb.GetStatusResponse(
    model="scripted", pool="p", sequence_tokens_max=100, block_size=4, allocator_connected=True
)


@contextmanager
def gateway(folder: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """Runs a gateway on a free port. The gateway's log is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["--listen", "127.0.0.1:0", *arguments]
    process = ServerProcess("quire_gateway", command, folder=folder, log=folder / "log", environment=environment)
    try:
        process.wait_ready(deadline=time.monotonic() + 30)
        yield process
    finally:
        process.stop()


def client(process: ServerProcess, key: str = "none", **options: Any) -> openai.OpenAI:
    """Returns OpenAI's client for a gateway, without retries."""
    return openai.OpenAI(base_url=f"http://{process.address}/v1", api_key=key, max_retries=0, timeout=60, **options)


def script(server: ScriptedServer) -> ScriptedServer:
    """Makes a scripted server answer as a worker: every prompt has three tokens, every request two samples."""
    server.answers["GetStatus"] = lambda *_: STATUS
    server.answers["ListAdapters"] = lambda *_: pb.ListAdaptersResponse()
    server.answers["Tokenize"] = lambda *_: pb.TokenizeResponse(token_ids=[1, 2, 3])
    server.answers["Generate"] = two_samples
    return server


class Curled(NamedTuple):
    """The output of curl."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Returns the error. Checks that it has exactly OpenAI's four fields."""
        found = json.loads(self.body)
        assert list(found) == ["error"]
        assert sorted(found["error"]) == ["code", "message", "param", "type"]
        error: dict[str, Any] = found["error"]
        return error


def curl(process: ServerProcess, path: str, *arguments: str, body: object = None) -> Curled:
    """Sends a request with curl."""
    data = () if body is None else ("--json", "@-")
    command = ["curl", "-sS", "-i", "--max-time", "60", *data, *arguments, f"http://{process.address}{path}"]
    done = subprocess.run(command, input=json.dumps(body).encode(), capture_output=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    head, _, rest = done.stdout.partition(b"\r\n\r\n")
    if head.split()[1] == b"100":
        head, _, rest = rest.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Curled(int(first.split()[1]), headers, rest)


def events(body: bytes) -> list[Any]:
    """Returns the events of a stream. Checks that the last event ends the stream."""
    blocks = body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
