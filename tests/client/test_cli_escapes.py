"""Names and errors from a server cannot send control codes to a terminal."""

from __future__ import annotations

from typing import Any

import grpc
from quire.v1 import worker_pb2 as pb

from tests.client.servers import quire, scripted_server

ESCAPE = "\x1b[2J\x9b8m"
SHOWN = "\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}8m"


def test_names_in_a_table_steer_no_terminal() -> None:
    with scripted_server() as server:
        adapter = pb.Adapter(name=f"a{ESCAPE}b", rank=8)
        server.answers["ListAdapters"] = lambda _request, _context: pb.ListAdaptersResponse(adapters=[adapter])
        listed = quire("adapter", "list", "--worker", server.address)
    assert listed.returncode == 0, listed.stderr
    assert f"a{SHOWN}b" in listed.stdout


def test_errors_of_a_server_steer_no_terminal() -> None:
    def refuse(_request: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no {ESCAPE} here")

    with scripted_server() as server:
        server.answers["ListAdapters"] = refuse
        refused = quire("adapter", "list", "--worker", server.address)
    assert refused.returncode == 8
    assert f"no {SHOWN} here" in refused.stderr
