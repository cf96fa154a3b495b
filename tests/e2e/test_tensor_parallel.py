"""Runs `--tensor-parallel 2` as users do, in real processes. Kills one rank, and checks that the other rank ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from quire import Allocator, Client
from quire.errors import QuireError
from quire_worker.model.tokenizer import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.stack import DEMO, eventually, server

GREEDY: Any = {"max_tokens": 300, "ignore_eos": True}
PROMPT = "The import statement"
LIMIT_S = 20.0  # limit for the end of a crew; an idle machine needs a second or two


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """Returns the text that transformers generates."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokens = torch.tensor([Tokenizer(DEMO).encode(PROMPT)])
    model.generation_config.eos_token_id = None
    written = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=300, do_sample=False, pad_token_id=0
    )
    return tuple(written[0, tokens.shape[1] :].tolist())


def members(worker: subprocess.Popen[bytes]) -> tuple[psutil.Process, psutil.Process]:
    """Returns the processes of rank 0 and rank 1. Rank 0 started rank 1, and another process that compiles
    structures."""
    leader = psutil.Process(worker.pid)
    (other,) = [child for child in leader.children() if not any("aside" in word for word in child.cmdline())]
    return leader, other


def test_two_ranks_outlive_their_allocator_and_end_when_one_is_killed(
    tmp_path: Path, expected: tuple[int, ...]
) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        own = ["--model", str(DEMO), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        ranks = ["--tensor-parallel", "2", "--log-format", "json"]
        with (
            server("quire_worker", *own, *ranks, folder=tmp_path / "worker") as worker,
            Client(worker.address) as client,
        ):
            _, other = members(worker.process)
            assert client.status().rank_count == 2
            assert client.generate(PROMPT, **GREEDY).samples[0].token_ids == expected
            stream = client.stream(PROMPT, **GREEDY)
            pieces = [next(stream).token_ids for _ in range(20)]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with (
                server("quire_allocator", "--listen", first.address, folder=tmp_path / "second"),
                Allocator(first.address) as allocator,
            ):
                pieces += [chunk.token_ids for chunk in stream]
                assert sum(pieces, ()) == expected
                stream = client.stream(PROMPT, max_tokens=3000, ignore_eos=True)
                next(stream)
                eventually(lambda: allocator.get_pool("default").connected, "the worker has attached again")
                other.kill()
                with pytest.raises(
                    QuireError, match=r"a rank of the worker has ended|the worker's device does not respond any more"
                ):
                    for _ in stream:
                        pass
                assert worker.process.wait(LIMIT_S) == 1
                assert allocator.list_pools() == (), "the pool was given back"
            log = (tmp_path / "worker" / "log").read_text()
            assert "quire-worker: rank 1 was ended by signal 9; all ranks have ended" in log
            assert '"rank": 1' in log


def test_the_other_rank_ends_by_itself_when_rank_0_is_killed_and_the_lease_ends(tmp_path: Path) -> None:
    with server(
        "quire_allocator", "--listen", "127.0.0.1:0", "--lease", "2", folder=tmp_path / "allocator"
    ) as allocator:
        own = ["--model", str(DEMO), "--allocator", allocator.address, "--listen", "127.0.0.1:0"]
        with server("quire_worker", *own, "--tensor-parallel", "2", folder=tmp_path / "worker") as worker:
            leader, other = members(worker.process)
            leader.kill()
            worker.process.wait()
            assert psutil.wait_procs([other], timeout=LIMIT_S)[1] == []
            with Allocator(allocator.address) as client:
                eventually(lambda: client.list_pools() == (), "the lease has ended")


def test_torchrun_starts_two_ranks_that_drain_when_it_is_told_to_stop(
    tmp_path: Path, expected: tuple[int, ...]
) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "allocator") as allocator:
        ready, log = tmp_path / "ready", tmp_path / "log"
        own = ["--model", str(DEMO), "--allocator", allocator.address, "--listen", "127.0.0.1:0"]
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "quire_worker",
            *own,
            "--log-format",
            "json",
        ]
        with log.open("wb") as output:
            torchrun = subprocess.Popen(
                [sys.executable, *command, "--metrics", "127.0.0.1:0", "--ready-file", str(ready)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdout=output,
                stderr=output,
            )
        try:
            eventually(
                lambda: time.sleep(0.1) or ready.exists() or torchrun.poll() is not None, "it serves", within_s=90
            )
            assert ready.exists(), log.read_text()
            started = json.loads(ready.read_text())
            crew = psutil.Process(torchrun.pid).children()
            assert len(crew) == 2
            with Client(started["address"]) as client:
                stream = client.stream(PROMPT, max_tokens=30, ignore_eos=True)
                pieces = [next(stream).token_ids]
                torchrun.terminate()
                pieces += [chunk.token_ids for chunk in stream]
            assert sum(pieces, ()) == expected[:30], "what runs is finished"
            assert psutil.wait_procs(crew, timeout=LIMIT_S)[1] == []
            with Allocator(allocator.address) as owner:
                assert owner.list_pools() == (), "the pool was given back"
            assert '"error"' not in log.read_text()
        finally:
            torchrun.terminate()
            torchrun.wait(60)
