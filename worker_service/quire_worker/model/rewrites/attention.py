"""Attention with merged projections: one product for q, k and v, then one kernel for head norms and rotation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from quire_cpu import ops
from quire_cpu.library import Library
from quire_cpu.ops import HeadNorms, PackedLinear

from quire_worker.model.adapters.sites import Site, site_of
from quire_worker.model.rewrites.interface import KernelRewrite, child_names, is_plain_linear, own_parameter_names
from quire_worker.model.rewrites.linear import packed_of
from quire_worker.model.rewrites.norm import weight_and_epsilon
from quire_worker.model.rewrites.recording import Recording
from quire_worker.model.transformers_seam import Scoring, Step

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class MergedAttention(torch.nn.Module):
    """Attention whose queries, keys and values are adjacent in one tensor, and are rotated in place."""

    def __init__(
        self,
        library: Library,
        projections: tuple[PackedLinear, PackedLinear],  # q/k/v, and o
        *,
        layer_index: int,
        head_dim: int,
        head_counts: tuple[int, int],  # query heads, KV heads
        norms: HeadNorms | None,
        scoring: Scoring,
        sites: Sequence[Site | None] = (),  # the sites of the projections q, k, v and o
    ) -> None:
        super().__init__()
        self.library = library
        self.qkv, self.output = projections
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.query_heads, self.kv_heads = head_counts
        self.norms = norms
        self.scoring = scoring
        self.sites = sites
        self.sinks = None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        quire_step: Step,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Computes attention with the interface of a transformers attention module.

        Args:
            hidden_states: `[1, tokens, hidden]`.
            position_embeddings: cosine and sine, each `[1, tokens, rotary_dim]`.
            attention_mask: ignored; it is None.
            residual: `[1, tokens, hidden]`, added to the result.
            quire_step: the forward pass.

        Returns:
            `[1, tokens, hidden]`, and None for the attention weights.
        """
        projected = self.qkv(hidden_states[0])
        self._adapt(hidden_states, projected)
        heads = projected.view(-1, self.query_heads + 2 * self.kv_heads, self.head_dim)
        turned = self.query_heads + self.kv_heads
        cosine, sine = position_embeddings
        ops.rotate_(self.library, heads[:, :turned], cosine[0], sine[0], query_heads=self.query_heads, norms=self.norms)
        query, key, value = heads[:, : self.query_heads], heads[:, self.query_heads : turned], heads[:, turned:]
        attended = quire_step.attend(self.layer_index, query, key, value, self.scoring)
        attended = attended.view(1, heads.shape[0], -1)
        output = self.output(attended, residual)
        if self.sites and self.sites[3] is not None:
            self.sites[3].add(attended, output)
        return output, None

    def _adapt(self, hidden_states: torch.Tensor, projected: torch.Tensor) -> None:
        """Adds the adapters' changes to queries, keys and values in place, `[tokens, heads * head_dim]` each."""
        first = 0
        for site, heads in zip(self.sites, (self.query_heads, self.kv_heads, self.kv_heads), strict=False):
            end = first + heads * self.head_dim
            if site is not None:
                site.add(hidden_states, projected[:, first:end])
            first = end


class AttentionRewrite(KernelRewrite):
    """Rewrites a module of q, k, v and o projections, with or without a norm of each query and key head.

    The pattern does not show how the module rotates, or whether it does more. The trial on recorded inputs does.
    """

    def __init__(self, library: Library, recording: Recording) -> None:
        """Keeps the recording, which has each layer's attention options."""
        super().__init__(library)
        self._recording = recording

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        names = child_names(module)
        if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
            return  # OLMo clips large elements; if the recorded inputs have none, a comparison would miss the clipping
        if own_parameter_names(module) or names - {"q_norm", "k_norm"} != set(PROJECTIONS):
            return
        layer_index, head_dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
        scoring = self._recording.scorings.get(layer_index) if isinstance(layer_index, int) else None
        layers = [layer for name in PROJECTIONS if is_plain_linear(layer := module.get_submodule(name))]
        if scoring is None or not isinstance(layer_index, int) or not isinstance(head_dim, int) or len(layers) < 4:
            return
        sizes = [layer.out_features for layer in layers[:3]]
        if sizes[1] != sizes[2] or any(size % head_dim for size in sizes):
            return
        projections = packed_of(self._library, *layers[:3]), packed_of(self._library, layers[3])
        for norms in _norms_of(module) if "q_norm" in names else [None]:
            yield MergedAttention(
                self._library,
                projections,
                layer_index=layer_index,
                head_dim=head_dim,
                head_counts=(sizes[0] // head_dim, sizes[1] // head_dim),
                norms=norms,
                scoring=scoring,
                sites=[site_of(layer) for layer in layers],
            )


def _norms_of(module: torch.nn.Module) -> Iterator[HeadNorms]:
    """Yields candidates for the norms of heads: with the weights as they are, and with 1 added to them."""
    query, key = (weight_and_epsilon(module.get_submodule(name)) for name in ("q_norm", "k_norm"))
    if query is None or key is None or query[1] != key[1]:
        return
    yield HeadNorms(query[0], key[0], query[1])
    yield HeadNorms(query[0] + 1, key[0] + 1, query[1])
