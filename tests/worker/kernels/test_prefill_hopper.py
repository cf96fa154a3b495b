"""Prefill on Hopper: its arithmetic on a CPU, what it compiles to, and its results where such a chip is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from quire_kernels.ops.prefill_hopper import CAPABILITY

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from kernel_sides.hopper_checks import SHAPES, Batch, Shape, check

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == CAPABILITY
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_every_shape_gives_the_softmax(shape: Shape, device: torch.device) -> None:
    row = check(shape, device)
    assert row["passed"], row
    assert row["kernel"] == ("triton" if shape.head_dim == 256 else "hopper")


@pytest.mark.gpu
@on_hopper
def test_a_graph_is_replayed_with_other_queries_keys_and_pages(device: torch.device) -> None:
    batch, other = Batch(SHAPES[0], device), Batch(SHAPES[0], device)
    batch.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = batch.run()
    batch.q.copy_(torch.randn_like(other.q))
    order = torch.randperm(batch.cache.page_count, device=device)
    for part, source in ((batch.cache.k, other.cache.k), (batch.cache.v, other.cache.v)):
        part[order] = source.clone()
    batch.table[1].copy_(order[other.table[1].long()])
    graph.replay()
    expected = batch.expected()
    torch.testing.assert_close(out.double(), expected[0], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)
