"""Cascades over shared prefixes, compared with attention over all keys at once, also as CUDA graphs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from quire_kernels.flashinfer import MultiLevelCascadeAttentionWrapper
from quire_kernels.flashinfer import cascade as real
from quire_kernels.shared.fp8 import E4M3
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.reference import attend, visible

from .attention_scene import assert_close

PAGE = 4


class Tree:
    """Keys in a tree of two or three levels: a root, optionally two branches, and four requests."""

    def __init__(
        self, lengths: list[list[int]], new: list[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Takes the number of keys of each node, `lengths[level]`. The last level has one node per entry of `new`."""
        self.lengths, self.new, self.device = lengths, new, device
        counts = [[-(-length // PAGE) for length in level] for level in lengths]
        total = sum(map(sum, counts))
        self.cache = torch.full((total + 2, 2, PAGE, 2, 64), torch.nan, device=device)
        self.levels: dict[str, list[torch.Tensor]] = {"qo": [], "indptr": [], "indices": [], "last": []}
        self.keys: list[list[torch.Tensor]] = []  # [level][node] -> keys and values, [length, 2, kv_heads, head_dim]
        ids = torch.randperm(total + 2).tolist()
        for level, nodes in enumerate(lengths):
            pages = [[ids.pop() for _ in range(count)] for count in counts[level]]
            self.keys.append([])
            for node, length in enumerate(nodes):
                keys = torch.randn(length, 2, 2, 64, device=device).to(dtype).float()
                for position in range(length):
                    self.cache[pages[node][position // PAGE], :, position % PAGE] = keys[position]
                self.keys[level].append(keys)
            share = len(new) // len(nodes)
            queries = [sum(new[node * share : (node + 1) * share]) for node in range(len(nodes))]
            self.levels["qo"].append(self.index([0, *queries]).cumsum(0, dtype=torch.int32))
            self.levels["indptr"].append(self.index([0, *counts[level]]).cumsum(0, dtype=torch.int32))
            self.levels["indices"].append(self.index([page for node in pages for page in node]))
            self.levels["last"].append(self.index([(n - 1) % PAGE + 1 if n else 0 for n in nodes]))
        self.cache = self.cache.to(dtype)
        self.q = torch.randn(sum(new), 4, 64, device=device).to(torch.float32 if dtype == E4M3 else dtype)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def plan(
        self, wrapper: MultiLevelCascadeAttentionWrapper | None = None, module: Any = real, **changes: Any
    ) -> MultiLevelCascadeAttentionWrapper:
        workspace = torch.empty(64, dtype=torch.uint8, device=self.device)
        wrapper = wrapper or module.MultiLevelCascadeAttentionWrapper(len(self.lengths), workspace)
        assert wrapper is not None
        wrapper.plan(*self.levels.values(), 4, 2, 64, PAGE, **{"causal": True, "q_data_type": "float32", **changes})
        return wrapper

    def reference(self, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends each request to all keys on its path from the root, at once."""
        outs, lses, start = [], [], 0
        for request, new in enumerate(self.new):
            nodes = [level[request * len(level) // len(self.new)] for level in self.keys]
            keys = torch.cat(nodes)
            out, lse = attend(
                self.q[start : start + new], keys[:, 0], keys[:, 1], visible(new, len(keys), causal=True), options
            )
            outs.append(out)
            lses.append(lse)
            start += new
        return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize(
    "lengths", [[[9, 4, 5, 6]], [[20], [3, 4, 5, 6]], [[20], [7, 0], [3, 4, 5, 6]], [[33, 2], [1, 4, 9, 2]]], ids=str
)
@pytest.mark.parametrize("new", [[1, 1, 1, 1], [1, 3, 2, 2]], ids=str)
def test_levels_together_are_attention_over_all_keys(
    lengths: list[list[int]], new: list[int], device: torch.device
) -> None:
    tree = Tree(lengths, new, device)
    assert_close(tree.plan().run(tree.q, tree.cache, return_lse=True), tree.reference(AttentionOptions(64**-0.5)))


@pytest.mark.parametrize("new", [[1, 1, 1, 1], [1, 3, 2, 2]], ids=str)
def test_queries_without_keys_on_any_level_give_zeros(new: list[int], device: torch.device) -> None:
    tree = Tree([[0], [0, 2, 5, 0]], new, device)
    out, lse = result = tree.plan().run(tree.q, tree.cache, return_lse=True)
    assert_close(result, tree.reference(AttentionOptions(64**-0.5)))
    assert out[0].eq(0).all()
    assert lse[0].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_levels_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device, dtype)
    actual = tree.plan(q_data_type=dtype).run(tree.q, tree.cache, return_lse=True)
    assert_close(actual, tree.reference(AttentionOptions(64**-0.5)))


def options_match(module: ModuleType, device: torch.device) -> None:
    """Compares soft cap, scale and sinks over an fp8 cache with scales. The module may be the real or a faulty one.

    Raises:
        AssertionError: the levels together differ from one attention over all keys.
    """
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device, E4M3)
    sinks = torch.randn(4, device=device)
    scales = {"k_scale": torch.tensor([0.5, 2.0], device=device), "v_scale": torch.tensor([3.0, 0.25], device=device)}
    options = AttentionOptions(0.3, logits_soft_cap=2.0, sinks=sinks, **scales)
    wrapper = tree.plan(module=module, sm_scale=0.3, logits_soft_cap=2.0, kv_data_type=E4M3)
    assert_close(wrapper.run(tree.q, tree.cache, return_lse=True, sinks=sinks, **scales), tree.reference(options))


def levels_match(module: ModuleType, device: torch.device) -> None:
    """Compares three levels with one empty node. The module may be the real or a faulty one.

    Raises:
        AssertionError: the levels together differ from one attention over all keys.
    """
    tree = Tree([[20], [7, 0], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    out = tree.plan(module=module).run(tree.q, tree.cache, return_lse=True)
    assert_close(out, tree.reference(AttentionOptions(64**-0.5)))


def test_options_hold_on_every_level_and_sinks_count_once(device: torch.device) -> None:
    options_match(real, device)


def test_cascades_refuse_what_would_be_wrong(device: torch.device) -> None:
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    with pytest.raises(ValueError, match=r"^window_left must be -1"):
        tree.plan(window_left=8)
    with pytest.raises(ValueError, match=r"^num_levels"):
        MultiLevelCascadeAttentionWrapper(0, torch.empty(1, dtype=torch.uint8))
    tree.levels["last"].pop()
    with pytest.raises(ValueError, match=r"^paged_kv_last_page_len must have 2 levels"):
        tree.plan()
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    tree.levels["qo"][0][-1] = 7
    with pytest.raises(ValueError, match=r"^the arrays in qo_indptr_arr must all end"):
        tree.plan()


def test_a_position_has_no_meaning_on_a_level(device: torch.device) -> None:
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    for encoding in ("ALIBI", "ROPE_LLAMA"):
        with pytest.raises(ValueError, match=r"^pos_encoding_mode must be"):
            tree.plan(pos_encoding_mode=encoding)


def graph_buffers(groups: list[int], device: torch.device) -> dict[str, list[torch.Tensor]]:
    """Makes buffers for levels with these numbers of groups, with room for twenty pages per group."""

    def each(*sizes: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]

    bounds = [count + 1 for count in groups]
    return {
        "qo_indptr_buf_arr": each(*bounds),
        "paged_kv_indptr_buf_arr": each(*bounds),
        "paged_kv_indices_buf_arr": each(*[20] * len(groups)),
        "paged_kv_last_page_len_buf_arr": each(*groups),
    }


def graph_wrapper(
    buffers: dict[str, list[torch.Tensor]], device: torch.device, levels: int = 2
) -> MultiLevelCascadeAttentionWrapper:
    workspace = torch.empty(64, dtype=torch.uint8, device=device)
    return MultiLevelCascadeAttentionWrapper(levels, workspace, "NHD", True, **buffers)


def test_a_graph_of_levels_sees_a_new_plan_where_the_old_one_was(device: torch.device) -> None:
    first, second = Tree([[20], [3, 4, 5, 6]], [2, 3, 2, 2], device), Tree([[31], [9, 2, 3, 8]], [1, 2, 2, 1], device)
    buffers = graph_buffers([1, 4], device)
    wrapper = graph_wrapper(buffers, device)
    for tree in (first, second, first):
        tree.plan(wrapper)
        result = wrapper.run(tree.q, tree.cache, return_lse=True)
        assert_close(result, tree.reference(AttentionOptions(64**-0.5)))
        for level in (0, 1):
            assert buffers["qo_indptr_buf_arr"][level].tolist() == tree.levels["qo"][level].tolist()
            indices = tree.levels["indices"][level].tolist()
            assert buffers["paged_kv_indices_buf_arr"][level][: len(indices)].tolist() == indices


def test_a_graph_of_levels_that_refuses_a_plan_keeps_the_one_before(device: torch.device) -> None:
    tree = Tree([[20], [3, 4, 5, 6]], [2, 3, 2, 2], device)
    buffers = graph_buffers([1, 4], device)
    wrapper = graph_wrapper(buffers, device)
    tree.plan(wrapper)
    kept = [buffer.clone() for array in buffers.values() for buffer in array]
    for message, other, changes in (
        (
            "^qo_indptr must have at most 9 tokens, like the CUDA graph, not 12",
            Tree([[9], [3, 4, 5, 6]], [3, 3, 3, 3], device),
            {},
        ),
        ("buf: the plan must have 4 requests, like the CUDA graph, not 2", Tree([[9], [3, 4]], [1, 2], device), {}),
        (
            "^paged_kv_indices_buf must be torch.int32 with at least .* entries, not torch.int32 with 20",
            Tree([[9], [90, 4, 5, 6]], [1, 1, 1, 1], device),
            {},
        ),
        ("^use_cuda_graph: plan", Tree([[9], [3, 4, 5, 6]], [1, 1, 1, 1], device), {"causal": False}),
    ):
        with pytest.raises(ValueError, match=message):
            other.plan(wrapper, **changes)
    assert all(
        torch.equal(buffer, before)
        for buffer, before in zip((b for array in buffers.values() for b in array), kept, strict=True)
    )
    assert_close(wrapper.run(tree.q, tree.cache, return_lse=True), tree.reference(AttentionOptions(64**-0.5)))


def test_a_graph_of_levels_needs_buffers_for_each(device: torch.device) -> None:
    buffers = graph_buffers([1, 4], device)
    with pytest.raises(ValueError, match=r"^use_cuda_graph needs 3 buffers in qo_indptr_buf_arr"):
        graph_wrapper(buffers, device, levels=3)
    del buffers["paged_kv_indices_buf_arr"]
    with pytest.raises(ValueError, match=r"^use_cuda_graph needs 2 buffers in paged_kv_indices_buf_arr"):
        graph_wrapper(buffers, device)
