"""vLLM's engine on the blocks of an allocator process that may be killed during the test. Run by `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import (
    PYTHON,
    WHY_NOT,
    in_vllm,
    prompts,
    run_engines,
    start_engine,
    told_across_a_kill,
)
from quire import Allocator
from quire.local import ServerProcess

from tests.client.servers import allocator_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

APART, SHARED = prompts(16, 128), prompts(16, 128, common=96)
SCENES: list[dict[str, Any]] = [
    {"blocks": 1024, "new_tokens": 32, "passes": [APART, APART]},
    {"blocks": 1024, "new_tokens": 32, "passes": [SHARED, SHARED]},
    {"blocks": 40, "new_tokens": 32, "passes": [APART, SHARED]},
]
LONG: dict[str, Any] = {"blocks": 1024, "new_tokens": 220, "passes": [prompts(8, 64), prompts(8, 64)]}
OURS = "quire_vllm.QuireScheduler"


@pytest.fixture
def allocator(tmp_path: Path) -> Iterator[ServerProcess]:
    with allocator_process(tmp_path, "--check-invariants") as process:
        yield process


def test_texts_and_hits_are_those_of_vllm(allocator: ServerProcess) -> None:
    stock = run_engines([{"scheduler": None, **scene} for scene in SCENES])
    ours = run_engines([{"scheduler": OURS, **scene} for scene in SCENES], QUIRE_VLLM_ALLOCATOR=allocator.address)
    for own, theirs in zip(ours, stock, strict=True):
        assert own["texts"] == theirs["texts"]
        assert own["usage"] == 0.0
        assert own["is_reset"]
    assert [own["hits"] for own in ours[:2]] == [theirs["hits"] for theirs in stock[:2]]
    with Allocator(allocator.address) as client:
        assert client.list_pools() == (), "each engine has given its pool back"


@pytest.mark.parametrize("is_async", [False, True])
def test_an_allocator_that_is_killed_changes_no_text(allocator: ServerProcess, tmp_path: Path, is_async: bool) -> None:
    (stock,) = run_engines([{"scheduler": None, **LONG}])
    scheduler = "quire_vllm.QuireAsyncScheduler" if is_async else OURS
    job = {"scheduler": scheduler, "is_async": is_async, **LONG}
    told = told_across_a_kill(job, allocator, tmp_path, "mine")
    assert told["texts"] == stock["texts"]
    assert told["hits"] == stock["hits"]
    assert told["usage"] == 0.0


def test_an_engine_without_an_allocator_does_not_start() -> None:
    engine = start_engine(
        {"scheduler": OURS, **LONG}, QUIRE_VLLM_ALLOCATOR="127.0.0.1:1", QUIRE_VLLM_OPEN_TIMEOUT_S="0.5"
    )
    output, _ = engine.communicate(timeout=120)
    assert engine.returncode != 0
    assert "the allocator at 127.0.0.1:1 did not grant pool" in output


def test_options_come_by_environment_and_by_additional_config() -> None:
    code = """
from types import SimpleNamespace as N
from quire_vllm.options import options_of
from quire_vllm.releases import UnsupportedError
def told(quire, ranks=1, **env):
    config = N(additional_config=quire, parallel_config=N(data_parallel_size=ranks, data_parallel_index=1))
    try:
        print("GIVEN", options_of(config, env))
    except UnsupportedError as error:
        print("REFUSED", error)
told({}, QUIRE_VLLM_POOL="a")
told({"quire": {"allocator": "h:1", "pool": "b"}}, 2, QUIRE_VLLM_POOL="a")
told({"quire": {"adress": "h:1"}})
told({}, QUIRE_VLLM_OPEN_TIMEOUT_S="soon")
"""
    lines = [line for line in in_vllm("-c", code).splitlines() if line.startswith(("GIVEN", "REFUSED"))]
    assert "allocator='', pool='a'" in lines[0]
    assert "allocator='h:1', pool='b-dp1'" in lines[1]
    names = "allocator, pool, namespace, open_timeout_s, metrics"
    assert lines[2] == f"REFUSED additional_config: quire accepts only {names}"
    assert lines[3].startswith("REFUSED open_timeout_s")
