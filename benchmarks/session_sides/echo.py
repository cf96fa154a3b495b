"""An echo server: it answers every message on a stream with the number of bytes that the message asks for.

    python benchmarks/session_sides/echo.py --cpu 0

Like the allocator, the echo server uses grpc.aio on uvloop, in one process, with the same engine and options. The first
line of its output is its address. The first four bytes of a message are the length of the answer, little-endian.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from typing import Any

import quire  # noqa: F401  # imported before grpc, because it selects grpc's engine

# isort: split
import grpc
import uvloop
from grpc import aio
from quire._serving.process import take_cpu
from quire.protocol.limits import MESSAGE_BYTES_MAX

METHOD = "/benchmark.Echo/Stream"
_ANSWER = bytes(MESSAGE_BYTES_MAX)


def request_of(size: int, answer_size: int) -> bytes:
    """Returns a message of `size` bytes that asks for `answer_size` bytes."""
    return answer_size.to_bytes(4, "little") + bytes(size - 4)


async def _echo(_requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
    while (request := await context.read()) is not aio.EOF:  # type: ignore[attr-defined]
        await context.write(_ANSWER[: int.from_bytes(request[:4], "little")])


async def _serve(listen: str) -> None:
    server = aio.server(options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)])
    service, _, method = METHOD[1:].partition("/")
    handler = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port(listen)
    await server.start()
    gc.freeze()
    print(listen if listen.startswith("unix:") else f"127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)  # Input ends with the parent process.


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, help="run only on this CPU")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address (default: %(default)s)")
    options = parser.parse_args()
    if options.cpu is not None:
        take_cpu(options.cpu)
    uvloop.run(_serve(options.listen))


if __name__ == "__main__":
    main()
