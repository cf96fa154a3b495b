"""SIGHUP, from a supervisor or a closed terminal, ends no server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from quire import Allocator, Client

from tests.e2e.stack import DEMO, eventually, server


def test_a_hang_up_ends_neither_an_allocator_nor_a_worker(tmp_path: Path) -> None:
    listen = ("--listen", "127.0.0.1:0")
    with server("quire_allocator", *listen, folder=tmp_path / "allocator") as allocator:
        arguments = ("--model", str(DEMO), "--allocator", allocator.address, "--blocks", "64", *listen)
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as worker, Client(worker.address) as client:
            for process, name in ((allocator, "allocator"), (worker, "worker")):
                os.kill(process._ready["pid"], signal.SIGHUP)
                log = tmp_path / name / "log"
                eventually(lambda log=log: "SIGHUP" in log.read_text(), "it was noticed")  # type: ignore[misc]
            assert client.generate("The for statement", max_tokens=2).samples
            with Allocator(allocator.address) as owner:
                assert [pool.pool for pool in owner.list_pools()] == ["default"]
