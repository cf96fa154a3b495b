"""With the compose file's profile `load`, both tenants send requests, and a worker's pool holds blocks of both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire import Allocator

from tests.e2e.composed import ROOT
from tests.e2e.stack import started


@pytest.mark.timeout(400)
def test_a_round_of_the_load_asks_for_both_tenants_at_every_worker() -> None:
    with started() as stack, Allocator(stack.allocator_address) as allocator:
        done = subprocess.run(
            ["sh", "-eu", str(ROOT / "deploy" / "load.sh"), "1"],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "QUIRE_WORKERS": stack.worker_address,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("first token") == 2, "each bench says what its callers got"
        cached = {each.namespace: each.cached_block_count for each in allocator.get_pool_usage("default").namespaces}
    assert cached.keys() >= {"acme", "beta"}
    assert min(cached["acme"], cached["beta"]) > 0
