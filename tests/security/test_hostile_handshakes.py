"""Strangers begin TLS handshakes at every port of the allocator and the worker, and never finish them."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Iterator

import pytest
from quire._serving.server import HANDSHAKE_S

from tests.security.certificates import Certificates
from tests.security.deployment import Deployment, deployed
from tests.security.test_hostile_doors import METHODS, assert_others_are_served, memory_bounded


@pytest.fixture(scope="module")
def deployment(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if not (certificates.folder / "honest.pem").exists():
        certificates.add("honest", "--pool", "honest*", "--observe", "*", "--namespace", "honest")
    with deployed(certificates, tmp_path_factory.mktemp("handshakes")) as running:
        yield running


@pytest.mark.parametrize("door", ["address", "metrics_address"])
@pytest.mark.parametrize("server", METHODS)
async def test_connections_that_never_finish_a_handshake_end_and_keep_nobody_out(
    deployment: Deployment, server: str, door: str
) -> None:
    host, _, port = getattr(getattr(deployment, server), door).rpartition(":")
    async with memory_bounded(deployment):
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        for _, writer in silent[::2]:
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")  # the first bytes of a ClientHello
        await assert_others_are_served(deployment)
        if door == "metrics_address":
            trusting = deployment.certificates.client("honest").http_context()
            url = f"https://localhost:{port}/healthz"
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=60, context=trusting) as answer:
                assert answer.status == 200
        async with asyncio.timeout(3 * HANDSHAKE_S):
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
