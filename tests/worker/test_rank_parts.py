"""Parts of ranks, tested in one process: their heads, their messages, and their rendezvous."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from quire.errors import UsageError
from quire.types import GroupKind, GroupSpec
from quire_worker.attention import AttentionBatch
from quire_worker.model.batch import Chunk, ForwardBatch, build_batch
from quire_worker.model.splitting.heads import heads_of_rank
from quire_worker.process.options import parse_arguments
from quire_worker.ranks.crew import Crew, RankLostError
from quire_worker.ranks.identity import RENDEZVOUS, RankIdentity, identity_of, loopback_interface
from quire_worker.ranks.rank_messages import pack, unpack

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "size"), [(8, 8, 2), (8, 4, 2), (8, 2, 4), (8, 1, 8), (12, 3, 2), (12, 2, 4), (6, 3, 6)]
)
def test_each_query_head_is_on_one_rank_and_reads_the_kv_head_that_it_read(
    query_heads: int, kv_heads: int, size: int
) -> None:
    found = []
    for rank in range(size):
        heads = heads_of_rank(query_heads, kv_heads, rank=rank, size=size)
        ratio = len(heads.query) // len(heads.kv)
        found += [(head, heads.kv[place // ratio]) for place, head in enumerate(heads.query)]
    assert found == [(head, head // (query_heads // kv_heads)) for head in range(query_heads)]


def test_kv_heads_are_repeated_only_as_far_as_they_must() -> None:
    assert [heads_of_rank(8, 4, rank=rank, size=2).kv for rank in range(2)] == [(0, 1), (2, 3)]
    assert [heads_of_rank(8, 2, rank=rank, size=4).kv for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [heads_of_rank(12, 3, rank=rank, size=2).kv for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]
    with pytest.raises(ValueError, match="8 query heads and 4 KV heads cannot be divided evenly among 3 ranks"):
        heads_of_rank(8, 4, rank=0, size=3)


@pytest.mark.parametrize("table_blocks", [3, 4_000], ids=["short", "long"])
def test_a_batch_arrives_as_it_was_sent(table_blocks: int) -> None:
    groups = [GroupSpec(GroupKind.FULL_ATTENTION, 16), GroupSpec(GroupKind.SLIDING_WINDOW, 16, 24)]
    tables = [range(table_blocks), range(table_blocks, 2 * table_blocks)]
    batch = build_batch([Chunk([7, 8, 9], 16 * table_blocks - 5, tables, needs_logits=True)], groups=groups)
    found = unpack(pack(batch), {"ForwardBatch": ForwardBatch, "AttentionBatch": AttentionBatch})
    torch.testing.assert_close(found.input_ids, batch.input_ids)
    torch.testing.assert_close(found.position_ids, batch.position_ids)
    for ours, theirs in zip(found.attention, batch.attention, strict=True):
        torch.testing.assert_close(ours.block_tables, theirs.block_tables)
        torch.testing.assert_close(ours.slot_mapping, theirs.slot_mapping)
        assert (ours.kv_length_max, ours.query_length_max) == (theirs.kv_length_max, theirs.query_length_max)


def test_a_message_holds_what_it_is_told_and_makes_nothing_else() -> None:
    values = (1, -2.5, None, True, "text", ([3, 4], [5]), torch.zeros(0, 3), torch.arange(5, dtype=torch.int32))
    found = unpack(pack(values), {})
    assert found[:6] == (1, -2.5, None, True, "text", ((3, 4), (5,)))
    assert found[6].shape == (0, 3)
    assert found[7].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match="a object cannot be sent"):
        pack(object())
    with pytest.raises(KeyError, match="RankIdentity"):
        unpack(pack(RankIdentity(file=None)), {})


def test_a_place_comes_from_the_command_line_from_torchrun_or_from_rank_0() -> None:
    assert identity_of({}, size=None, may_leave_machine=False) == RankIdentity()
    assert identity_of({}, size=4, may_leave_machine=False) == RankIdentity(size=4, local_size=4)
    started = {"RANK": "3", "WORLD_SIZE": "4", RENDEZVOUS: "meet"}
    assert identity_of(started, size=4, may_leave_machine=False) == RankIdentity(3, 4, 3, 4, Path("meet"))
    assert identity_of(TORCHRUN, size=None, may_leave_machine=False) == RankIdentity(1, 2, 0, 1, is_by_torchrun=True)


def test_torchrun_and_the_command_line_must_agree_and_ranks_meet_on_loopback() -> None:
    with pytest.raises(UsageError, match="--tensor-parallel 4: torchrun has started 2 ranks"):
        identity_of(TORCHRUN, size=4, may_leave_machine=False)
    for address in ("10.0.0.5", "node-1", "fd00::5"):
        elsewhere = TORCHRUN | {"MASTER_ADDR": address}
        with pytest.raises(UsageError, match=f"would connect through {address}.* give --trusted-rank-network"):
            identity_of(elsewhere, size=None, may_leave_machine=False)
        assert not identity_of(elsewhere, size=None, may_leave_machine=True).is_on_loopback
    assert identity_of(TORCHRUN | {"MASTER_ADDR": "::1"}, size=2, may_leave_machine=False).is_on_loopback


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tensor-parallel", "0"], "--tensor-parallel must be at least 1"),
        (["--rank-timeout", "0"], "--rank-timeout must be at least 1 second, not 0"),
        (["--rank-timeout", "nan"], "--rank-timeout must be at least 1 second, not nan"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be above 0 and at most 1, not 1.5"),
        (["--max-running", "100000"], "not 100000"),
        (["--max-batch-tokens", "100000000"], "blocks of 16, not 100,000,000"),
        (["--speculative-tokens", "-1"], "not -1"),
    ],
)
def test_senseless_numbers_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "folder", *arguments])
    assert complaint in capsys.readouterr().err


def test_ranks_on_loopback_follow_no_inherited_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's profile may name its network interface, where others could read the ranks' messages."""
    inherited = {
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_COMM_ID": "10.0.0.5:4000",
        "NCCL_OOB_NET_ENABLE": "1", "NCCL_OOB_NET_IFNAME": "eth0",
    }  # fmt: skip
    for variable, value in inherited.items():
        monkeypatch.setenv(variable, value)
    seen: list[dict[str, str]] = []

    def init_process_group(*_: object, **__: object) -> None:
        seen.append({variable: os.environ[variable] for variable in inherited if variable in os.environ})
        raise RuntimeError("as far as it goes here")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(RankLostError):
        Crew(RankIdentity(0, 2, 0, 2, tmp_path / "nowhere"), device=torch.device("cpu"), timeout_s=1.0)
    assert seen == [dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback_interface())]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    elsewhere = RankIdentity(0, 2, 0, 1, tmp_path / "nowhere", is_on_loopback=False)
    with pytest.raises(RankLostError):  # The crew uses the network interface that the variable names.
        Crew(elsewhere, device=torch.device("cpu"), timeout_s=1.0)
    assert seen[1]["GLOO_SOCKET_IFNAME"] == "eth0"
