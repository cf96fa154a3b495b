"""Tests CORS: which web pages may call the gateway from a browser, with which methods and headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.servers import ScriptedServer, scripted_server
from tests.gateway.scene import curl, gateway, script

KEY = "sk-alpha-0123456789"


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield script(server)


def test_pages_of_other_origins_are_let_in_only_where_they_are_named(worker: ScriptedServer, tmp_path: Path) -> None:
    asked = ("-X", "OPTIONS", "-H", "Origin: https://app.example", "-H", "Access-Control-Request-Method: POST")
    with gateway(tmp_path / "a", "--worker", worker.address) as served:
        assert not any("access-control" in name for name in curl(served, "/v1/models", *asked[2:4]).headers)
    arguments = ("--worker", worker.address, "--cors-origin", "https://app.example")
    with gateway(tmp_path / "b", *arguments, QUIRE_API_KEYS=KEY) as served:
        answer = curl(served, "/v1/completions", *asked, "-H", "Access-Control-Request-Headers: authorization")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert answer.headers["access-control-allow-headers"] == "authorization", "browsers show no key before they may"
        answer = curl(served, "/v1/completions", *asked, "-H", "Access-Control-Request-Private-Network: true")
        assert (answer.status, answer.headers["access-control-allow-private-network"]) == (200, "true")
        for path in ("/v1/models", "/v1/responses/r/input_items", "/metrics", "/nowhere"):
            head = curl(served, path, *asked[:4], "-H", "Access-Control-Request-Method: HEAD",
                        "-H", "Access-Control-Request-Headers: authorization,x-request-id")  # fmt: skip
            assert (head.status, head.headers["access-control-allow-origin"]) == (200, "https://app.example")
            assert head.headers["access-control-allow-headers"] == "authorization,x-request-id"
            assert head.headers["vary"].startswith("Origin")
        nameless = curl(served, "/v1/models", *asked[:2], "-H", "Origin: null", *asked[4:])
        assert nameless.status == 400
        assert "access-control-allow-origin" not in nameless.headers, "any file and any frame without an origin is null"
        refused = curl(served, "/v1/models", *asked[2:4])
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
        assert refused.headers["access-control-expose-headers"] == "retry-after, x-request-id"
        assert (
            "access-control-allow-origin" not in curl(served, "/v1/models", "-H", "Origin: https://x.example").headers
        )
