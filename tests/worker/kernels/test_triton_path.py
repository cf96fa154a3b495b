"""The parts of the worker's Triton path that are not covered by `tests/worker/test_attention.py`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from quire_kernels.ops import sampling as kernels_sampling
from quire_worker.attention.triton_path import TritonPagedAttention, page_table
from quire_worker.sampling.choice import sample
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.random_numbers import new_generator

from tests.worker.attention_batches import Scene


def test_a_page_table_leaves_out_padding_and_sequences_without_keys() -> None:
    scene = Scene([(30, 1), (0, 1), (15, 1), (16, 1)])
    batch = scene.batch
    lengths, tables = batch.kv_lengths.clone(), batch.block_tables
    assert page_table(batch, 16).indptr.tolist() == [0, 2, 3, 4, 6]
    assert page_table(batch, 16).last_page_len.tolist() == [15, 1, 16, 1]
    expected = [*tables[0, :2].tolist(), int(tables[1, 0]), int(tables[2, 0]), *tables[3, :2].tolist()]
    assert page_table(batch, 16).indices.tolist() == expected
    lengths[2] = 0
    table = page_table(dataclasses.replace(batch, kv_lengths=lengths), 16)
    assert table.indptr.tolist() == [0, 2, 3, 3, 5]
    assert table.last_page_len.tolist() == [15, 1, 0, 1]
    assert {part.dtype for part in table} == {torch.int32}


def test_each_kind_of_layer_is_planned_once(device: torch.device) -> None:
    scene = Scene([(30, 1), (3, 1)])
    plan = TritonPagedAttention(device, workspace_bytes=8 << 20).plan(scene.batch, scene.spec)
    scene.pages.nan_to_num_()
    for _ in range(3):
        for window_left in (-1, 4):
            plan.attend(scene.query.to(device), scene.pages.to(device), scale=0.2, window_left=window_left)
    assert [kind.window_left for kind in plan.wrappers] == [-1, 4]


def test_a_slot_outside_the_pages_is_refused_before_anything_is_written(device: torch.device) -> None:
    scene = Scene([(0, 3)])
    slots = scene.batch.slot_mapping.clone()
    slots[1] = scene.pages.shape[0] * 16
    batch = dataclasses.replace(scene.batch, slot_mapping=slots)
    plan = TritonPagedAttention(device, workspace_bytes=8 << 20).plan(batch, scene.spec)
    pages = scene.pages.to(device)
    with pytest.raises(ValueError, match="slot_mapping"):
        plan.append(scene.keys[0].to(device), scene.values[0].to(device), pages)
    assert pages.isnan().all()


# -- sampling ----------------------------------------------------------------------------------------------------------

SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.5),
    SamplingParams(temperature=1e-3),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.95, min_p=0.02),
)


def some_logits(rows: int, device: torch.device) -> torch.Tensor:
    return (3 * torch.randn(rows, 320, generator=torch.Generator().manual_seed(rows))).to(device)


def test_the_kernel_chooses_what_sorting_chooses(device: torch.device) -> None:
    params = [SETTINGS[row % len(SETTINGS)] for row in range(60)]
    logits = some_logits(len(params), device)
    ours, theirs = ([new_generator(7, row) for row in range(len(params))] for _ in range(2))
    backend = TritonPagedAttention(device, workspace_bytes=1 << 20)
    for _ in range(3):
        assert (
            sample(logits, params, ours, backend.choose_tokens).tolist()
            == sample(logits.cpu(), params, theirs).tolist()
        )
    for one, other in zip(ours, theirs, strict=True):  # Each pair of generators has advanced equally.
        assert torch.equal(one.get_state(), other.get_state())


def test_choosing_that_runs_out_of_memory_leaves_the_generators_where_they_were(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    logits, params = some_logits(3, device), [SamplingParams(temperature=1.0)] * 3
    backend = TritonPagedAttention(device, workspace_bytes=1 << 20)
    expected = sample(logits, params, [new_generator(5, row) for row in range(3)], backend.choose_tokens).tolist()
    generators = [new_generator(5, row) for row in range(3)]
    for allocation in ("empty", "tensor", "zeros"):
        with monkeypatch.context() as patched:
            patched.setattr(torch, allocation, without_memory)
            with pytest.raises(torch.OutOfMemoryError):
                sample(logits, params, generators, backend.choose_tokens).tolist()
    assert sample(logits, params, generators, backend.choose_tokens).tolist() == expected


def test_tokens_go_where_they_are_asked_to_go(device: torch.device) -> None:
    logits = some_logits(4, device)
    out = torch.empty(4, dtype=torch.int32, device=device)
    uniform = torch.zeros(4, device=device)
    assert kernels_sampling.sample(logits, uniform, 0.0, out=out) is out
    assert out.tolist() == logits.argmax(1).tolist()
    with pytest.raises(ValueError, match=r"out must be torch\.int32"):
        kernels_sampling.sample(logits, uniform, out=out.long())
    with pytest.raises(ValueError, match="out must be contiguous"):
        kernels_sampling.sample(logits, uniform, out=torch.empty(8, dtype=torch.int32, device=device)[::2])
