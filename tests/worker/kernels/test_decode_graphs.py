"""Replayed decode passes give the same logits as passes that are laid out from scratch.

On a GPU, CUDA graphs are replayed. In the interpreter, a replay computes again from the memory that a graph would read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.execution.decode_graphs import Capture, Compute, DecodeGraphs, Replay, decode_graphs_of, ladder
from quire_worker.model.batch import Chunk, ForwardBatch, build_batch
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel

from tests.worker.tiny_models import write_tiny, write_tiny_llama

pytestmark = pytest.mark.interpreted

BLOCKS = 24  # number of blocks per group


@pytest.fixture
def triton_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Returns the device of models on the Triton kernels."""
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return device


def write_windows(folder: Path) -> Path:
    """Writes a model with a sliding window and full attention."""
    layer_types = ["sliding_attention", "full_attention"]
    return write_tiny("gemma3", folder, num_hidden_layers=2, layer_types=layer_types)


def write_latents(folder: Path, **changes: Any) -> Path:
    """Writes a model with latent attention, and with experts unless `changes` remove them."""
    return write_tiny("deepseek_v2", folder, kv_lora_rank=16, qk_rope_head_dim=16, head_dim=16, **changes)


def write_dense_latents(folder: Path) -> Path:
    return write_latents(folder, first_k_dense_replace=2)


def write_sinks(folder: Path) -> Path:
    """Writes a model with a sliding window and full attention, sinks and experts."""
    layer_types = ["sliding_attention", "full_attention"]
    return write_tiny("gpt_oss", folder, num_hidden_layers=2, layer_types=layer_types)


# In float32 torch picks experts on the host, so these models cannot be captured in a graph.
WITH_EXPERTS = [
    pytest.param(write, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="its experts cannot be captured"))
    for write in (write_sinks, write_latents)
]


def repeated(compute: Compute) -> Replay:
    """Replaces graph capture without a GPU: each replay computes again, into the same result tensor."""
    result = compute().clone()
    return Replay(lambda: result.copy_(compute()), result)


def capture_for(device: torch.device) -> Callable[[Compute], Replay]:
    return Capture() if device.type == "cuda" else repeated


def cache_of(model: PagedModel) -> KVCache:
    cache = KVCache(model.cache_spec, BLOCKS * len(model.cache_spec.groups), device=model.device)
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    return cache


def chunks(model: PagedModel, lengths: list[int], starts: list[int]) -> list[Chunk]:
    """Makes chunks of sequences; each sequence has `BLOCKS // 4` blocks of its own, in reverse order."""
    share, found = BLOCKS // 4, []
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        tables = [
            [group * BLOCKS + BLOCKS - 1 - number * share - place for place in range(share)]
            for group in range(len(model.cache_spec.groups))
        ]
        tokens = [(7 * number + 3 * position + 1) % 300 for position in range(start, start + length)]
        found.append(Chunk(tokens, start, tables, needs_logits=True))
    return found


def batch_of(model: PagedModel, lengths: list[int], starts: list[int]) -> ForwardBatch:
    return build_batch(chunks(model, lengths, starts), groups=model.cache_spec.groups)


@pytest.mark.parametrize("write", [write_tiny_llama, write_windows, write_dense_latents, *WITH_EXPERTS])
def test_a_replay_gives_the_logits_of_a_pass_of_its_own(
    write: Callable[[Path], Path], triton_device: torch.device, tmp_path: Path
) -> None:
    model = load_model(write(tmp_path / "model"), device=triton_device)
    replayed, launched = cache_of(model), cache_of(model)
    graphs = DecodeGraphs(model, replayed, [4], capture=capture_for(triton_device))
    begun = batch_of(model, [20, 5, 17], [0, 0, 0])
    assert graphs.logits_of(begun) is None, "prompts"
    for cache in (replayed, launched):
        model.forward(begun.on(triton_device), cache)
    for starts in ([20, 5, 17], [21, 6, 18]):  # The graph has four rows, and the batch three sequences.
        batch = batch_of(model, [1, 1, 1], starts)
        logits = graphs.logits_of(batch)
        assert logits is not None
        torch.testing.assert_close(logits, model.forward(batch.on(triton_device), launched), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(replayed.buffers, launched.buffers, strict=True):
        # Unwritten slots are NaN, so the comparison of NaN shows that both paths wrote the same slots.
        difference = (ours.view(torch.float32) - theirs.view(torch.float32)).abs()
        assert torch.equal(ours.view(torch.float32).isnan(), theirs.view(torch.float32).isnan())
        assert difference.nan_to_num().max() < 1e-3


def test_what_no_graph_was_captured_for_is_left_to_a_pass(triton_device: torch.device, tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path / "model"), device=triton_device)
    seen = list[tuple[int, int, str]]()
    graphs = DecodeGraphs(
        model, cache_of(model), [1, 2], capture=capture_for(triton_device), progress=lambda *step: seen.append(step)
    )
    assert seen == [(0, 2, "decode of 2"), (1, 2, "decode of 1"), (2, 2, "done")]
    alone = graphs.logits_of(batch_of(model, [1], [0]))
    assert alone is not None
    assert alone.shape == (1, model.vocab_size)
    assert graphs.logits_of(batch_of(model, [1, 1, 1], [0, 0, 0])) is None, "larger than all graphs"
    silent = [Chunk(each.tokens, each.start, each.block_tables, needs_logits=False) for each in chunks(model, [1], [0])]
    assert graphs.logits_of(build_batch(silent, groups=model.cache_spec.groups)) is None, "no logits wanted"


def test_a_slot_outside_the_pages_is_refused_before_a_replay(triton_device: torch.device, tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path / "model"), device=triton_device)
    graphs = DecodeGraphs(model, cache_of(model), [1], capture=capture_for(triton_device))
    astray = [Chunk([1], 0, [[BLOCKS]], needs_logits=True)]
    with pytest.raises(ValueError, match="slot"):
        graphs.logits_of(build_batch(astray, groups=model.cache_spec.groups))


def test_the_ladder_leaves_at_most_seven_rows_empty() -> None:
    assert ladder(0) == []
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 3]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(30) == [1, 2, 4, 8, 16, 24, 30]
    for count in range(1, 31):
        assert next(size for size in ladder(30) if size >= count) - count < 8


def test_nothing_is_captured_on_a_cpu(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path / "model"))
    assert decode_graphs_of(model, cache_of(model), 8) is None
