"""A client for OpenAI's completions that costs almost nothing: it sends raw requests and counts the events of streams.

OpenAI's own package takes longer for an event than a server does, so it would measure the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import NamedTuple

END = b"data: [DONE]"
IDLE_S = 1.0  # seconds after which an idle connection is not reused: some servers close idle connections after 5 s


class Answered(NamedTuple):
    """The times of one finished completion."""

    first_token_s: float
    output_tokens: int


class HttpCaller:
    """One connection, kept alive, with one request at a time."""

    def __init__(self, address: str, model: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._model = model
        self._idle_since_s = 0.0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def complete(self, prompt: list[int], output_tokens: int) -> Answered:
        """Streams one completion to its end.

        Raises:
            RuntimeError: the server refuses, or does not report the requested number of tokens.
        """
        if time.monotonic() - self._idle_since_s > IDLE_S:
            await self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        ask = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(ask).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        started = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answers {answer.splitlines()[0].decode()}")
        first_token_s, last = 0.0, b""
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            chunk = await reader.readexactly(size + 2)
            if not size:
                break
            first_token_s = first_token_s or time.perf_counter() - started
            last = (last + chunk[:-2])[-2_000:]
        usage = json.loads(last.split(END)[0].strip().rsplit(b"data: ", 1)[1])["usage"]
        if usage["completion_tokens"] != output_tokens:
            raise RuntimeError(f"the server counted {usage['completion_tokens']} tokens instead of {output_tokens}")
        self._idle_since_s = time.monotonic()
        return Answered(first_token_s, output_tokens)

    async def close(self) -> None:
        """Ends the connection to the server."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
