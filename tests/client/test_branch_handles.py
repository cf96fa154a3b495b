"""Tests a client's branch handles: what they refuse before sending, and how they renew branches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from quire import Client, InvalidArgumentError
from quire._branch_ids import OpenBranches
from quire.v1 import worker_pb2 as pb

from tests.client.servers import ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["Prefill"] = lambda *_: pb.PrefillResponse(branch_id=b"b", token_count=1, ttl_ms=60_000)
        yield running


@pytest.mark.parametrize("ttl_s", [0, -1, 0.05, 3601, float("nan"), float("inf"), 1e300])
def test_a_length_of_time_out_of_range_is_refused_as_it_was_given(server: ScriptedServer, ttl_s: float) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgumentError, match="ttl_s must be from") as raised:
        client.prefill("p", ttl_s=ttl_s)
    assert raised.value.field == "ttl_s"
    assert str(ttl_s) in str(raised.value)
    assert not server.attempts


def test_a_length_of_time_that_is_no_number_is_named(server: ScriptedServer) -> None:
    wrong: Any = "5"
    with Client(server.address) as client, pytest.raises(TypeError, match="ttl_s"):
        client.prefill("p", ttl_s=wrong)


def test_one_text_is_not_scored_letter_by_letter(server: ScriptedServer) -> None:
    with Client(server.address) as client, pytest.raises(TypeError, match="candidates must be a list"):
        client.prefill("p").score("abc")


def test_handles_may_come_and_go_while_others_are_renewed() -> None:
    class Handle:
        def __init__(self, number: int) -> None:
            self.id = number.to_bytes(4, "big")

    wanted, ended, interval = OpenBranches(), threading.Event(), sys.getswitchinterval()
    held = list[Handle]()

    def fork() -> None:
        for number in range(20_000):
            held.append(Handle(number))
            wanted.add(held[-1])
        ended.set()

    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=fork)
        thread.start()
        while not ended.is_set():
            wanted.ids()  # A RuntimeError here would end the renewing thread.
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wanted.ids() == [handle.id for handle in held]
    held.clear()
    assert not wanted.ids()
