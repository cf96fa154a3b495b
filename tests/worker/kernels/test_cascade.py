"""Cascades over shared prefixes against one attention over all keys."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from quire_worker.kernels import cascade as real
from quire_worker.kernels.e4m3 import E4M3
from quire_worker.kernels.options import AttentionOptions
from quire_worker.kernels.reference import attend, visible
from quire_worker.kernels.wrappers import MultiLevelCascadeAttentionWrapper

from .attention_scene import assert_close

PAGE = 4


class Tree:
    """Keys in a tree of two or three levels: a root, perhaps two branches, four requests."""

    def __init__(
        self, lengths: list[list[int]], new: list[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """`lengths[level]` are the keys of each node; level l has 1, 2 or 4 nodes, the last as many as `new`."""
        self.lengths, self.new, self.device = lengths, new, device
        counts = [[-(-length // PAGE) for length in level] for level in lengths]
        total = sum(map(sum, counts))
        self.cache = torch.full((total + 2, 2, PAGE, 2, 64), torch.nan, device=device)
        self.levels: dict[str, list[torch.Tensor]] = {"qo": [], "indptr": [], "indices": [], "last": []}
        self.keys: list[list[torch.Tensor]] = []  # [level][node], [length, 2, kv_heads, head_dim]
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

    def plan(self, module: Any = real, **changes: Any) -> MultiLevelCascadeAttentionWrapper:
        workspace = torch.empty(64, dtype=torch.uint8, device=self.device)
        wrapper: MultiLevelCascadeAttentionWrapper = module.MultiLevelCascadeAttentionWrapper(
            len(self.lengths), workspace
        )
        wrapper.plan(*self.levels.values(), 4, 2, 64, PAGE, **{"causal": True, "q_data_type": "float32", **changes})
        return wrapper

    def reference(self, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request against all keys on its way from the root, at once."""
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
    """Soft cap, scale and sinks over an fp8 cache with scales: used on the real module and on faulty ones.

    Raises:
        AssertionError: the levels together differ from one attention over all keys.
    """
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device, E4M3)
    sinks = torch.randn(4, device=device)
    scales = {"k_scale": torch.tensor([0.5, 2.0], device=device), "v_scale": torch.tensor([3.0, 0.25], device=device)}
    options = AttentionOptions(0.3, logits_soft_cap=2.0, sinks=sinks, **scales)
    wrapper = tree.plan(module, sm_scale=0.3, logits_soft_cap=2.0, kv_data_type=E4M3)
    assert_close(wrapper.run(tree.q, tree.cache, return_lse=True, sinks=sinks, **scales), tree.reference(options))


def levels_match(module: ModuleType, device: torch.device) -> None:
    """Three levels, one of whose nodes is empty: used on the real module and on faulty ones.

    Raises:
        AssertionError: the levels together differ from one attention over all keys.
    """
    tree = Tree([[20], [7, 0], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    out = tree.plan(module).run(tree.q, tree.cache, return_lse=True)
    assert_close(out, tree.reference(AttentionOptions(64**-0.5)))


def gains_are_sensible(module: ModuleType, device: torch.device) -> None:
    """Used on the real module and on faulty ones; `device` does not matter.

    Raises:
        AssertionError: levels are said to pay where they cannot, or not to where they do.
    """
    del device
    gains = module.cascade_gains
    assert gains(4096, [100] * 32, group=4)
    assert not gains(4096, [100], group=4)  # lonely
    assert not gains(16, [100] * 32, group=4)  # short
    assert not gains(0, [], group=4)
    assert gains(200, [100] * 2, group=4)
    assert not gains(200, [100] * 2, group=64)  # whose results cost more than the prefix


def test_options_hold_on_every_level_and_sinks_count_once(device: torch.device) -> None:
    options_match(real, device)


def test_cascades_refuse_what_would_be_wrong(device: torch.device) -> None:
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    with pytest.raises(ValueError, match=r"^window_left must be -1"):
        tree.plan(window_left=8)
    with pytest.raises(ValueError, match=r"^num_levels"):
        MultiLevelCascadeAttentionWrapper(0, torch.empty(1, dtype=torch.uint8))
    tree.levels["last"].pop()
    with pytest.raises(ValueError, match=r"^paged_kv_last_page_len has 1 levels"):
        tree.plan()
    tree = Tree([[20], [3, 4, 5, 6]], [1, 3, 2, 2], device)
    tree.levels["qo"][0][-1] = 7
    with pytest.raises(ValueError, match=r"^qo_indptr_arr ends at different"):
        tree.plan()


def test_a_long_prefix_of_many_requests_gains_and_a_short_or_lonely_one_does_not(device: torch.device) -> None:
    gains_are_sensible(real, device)
