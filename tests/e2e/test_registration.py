"""A worker tells the allocator what routers may know of it: at its start, when that changes, and when it drains."""

from __future__ import annotations

import signal

import pytest
from quire import Allocator
from quire.errors import NotFoundError
from quire.types import RoutedWorker
from quire_worker.process.options import make_parser
from quire_worker.process.registration import reachable

from tests.e2e.stack import DEMO, clients, eventually, started

PROMPT = "The for statement is used to iterate over the elements of a sequence. " * 20


def worker_of(pools: Allocator) -> RoutedWorker:
    found = pools.get_pool("default").worker
    assert found is not None
    return found


def test_a_worker_registers_measures_its_rate_and_says_that_it_drains() -> None:
    with started("--blocks", "512", "--drain-timeout", "60") as stack, clients(stack) as (client, pools):
        assert worker_of(pools) == RoutedWorker(stack.worker_address, "demo")
        assert stack.worker is not None
        client.generate(PROMPT, max_tokens=1)
        eventually(lambda: worker_of(pools).prefill_tokens_per_s > 0, "its rate is told", within_s=60)
        with client.stream("The for statement", max_tokens=1_500, ignore_eos=True) as answer:
            next(iter(answer))
            stack.worker.process.send_signal(signal.SIGTERM)
            eventually(lambda: worker_of(pools).draining, "it says that it drains", within_s=60)
            with pytest.raises(NotFoundError):  # `route` no longer chooses this worker.
                pools.route("demo", b"", 1)
        eventually(lambda: not pools.list_pools(), "it has left", within_s=60)


def test_an_advertised_address_is_what_gateways_get() -> None:
    with started("--blocks", "64", "--advertise", "LOCALHOST:7071") as stack, clients(stack) as (_, pools):
        assert pools.route("demo", b"", 1).address == "localhost:7071"


def test_a_worker_on_all_addresses_has_the_name_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine-7")
    assert reachable("0.0.0.0:7071") == reachable("[::]:7071") == "machine-7:7071"
    assert reachable("10.0.0.5:7071") == "10.0.0.5:7071"
    assert reachable("unix:///run/worker.sock") == "unix:///run/worker.sock"


@pytest.mark.parametrize("address", ["machine", "machine:0", f"{'m' * 252}:7071"])
def test_an_address_that_cannot_be_advertised_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--model", str(DEMO), "--advertise", address])
    assert "--advertise" in capsys.readouterr().err
