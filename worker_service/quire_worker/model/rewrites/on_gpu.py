"""Rewrites of decoder layers for a GPU: merged products of cuBLAS, with one Triton kernel between two products.

A decoder layer of a Llama-like model makes about 30 launches in transformers' modules. Rewritten, it makes these 10:

    norm | q/k/v product | rotate and append | attend, merge its parts | product + residual
    norm | gate/up product | activation | product + residual

Products are added to the residual in place. With another destination, cuBLAS would first copy the residual.

The kernels support neither pages of fp8 nor layers that read another layer's keys. Such layers run part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from quire_kernels.ops.gated_activation import gelu_tanh_and_mul, silu_and_mul
from quire_kernels.ops.rms_norm import gemma_rmsnorm, rmsnorm
from quire_kernels.ops.rotate_append import HeadNorms

from quire_worker.attention.triton_path import TritonAttentionPlan
from quire_worker.model.rewrites.attention import PROJECTIONS
from quire_worker.model.rewrites.decoder_layer import DecoderLayer, DecoderLayerRewrite
from quire_worker.model.rewrites.gated_mlp import PROJECTIONS as GATED_PROJECTIONS
from quire_worker.model.rewrites.interface import Rewrite, child_names, is_plain_linear, own_parameter_names
from quire_worker.model.rewrites.norm import weight_and_epsilon
from quire_worker.model.rewrites.recording import Recording
from quire_worker.model.rewrites.rewriter import RewritePass, Rewritten
from quire_worker.model.transformers_seam import PagedStep, Scoring, Step

ACTIVATIONS = (silu_and_mul, gelu_tanh_and_mul)


class MergedLinear:
    """Several linear layers with the same input, computed as one product. The product also adds a residual."""

    def __init__(self, *layers: torch.nn.Linear) -> None:
        """Copies the weights of several layers side by side. The weight of a single layer is not copied."""
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias for layer in layers]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [
                    weight.new_zeros(len(weight)) if bias is None else bias.detach()
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes `[..., outputs]` from `[..., inputs]`, and adds `residual` if there is one."""
        if residual is None:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        rows, added = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
        if self.bias is not None:
            added = added + self.bias
        return torch.addmm(added, rows, self.weight.t()).view(residual.shape)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the product to `residual` in place, and returns it. `residual` must be contiguous."""
        rows, added = x.reshape(-1, x.shape[-1]), residual.view(-1, residual.shape[-1])
        if self.bias is not None:
            added += self.bias
        return added.addmm_(rows, self.weight.t()).view(residual.shape)


class GpuNorm(torch.nn.Module):
    """Computes x / sqrt(mean(x^2) + epsilon) * weight, or * (weight + 1) if `is_from_one`."""

    def __init__(self, weight: torch.Tensor, epsilon: float, *, is_from_one: bool) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon
        self._norm = gemma_rmsnorm if is_from_one else rmsnorm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Computes the norm over the last dimension of `[..., size]`."""
        return self._norm(hidden_states, self.weight, self.epsilon)


class GpuNormRewrite(Rewrite):
    """Rewrites a module of one vector and an epsilon."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        found = weight_and_epsilon(module)
        if found is not None:
            for is_from_one in (False, True):
                yield GpuNorm(*found, is_from_one=is_from_one)


class GpuGatedMlp(torch.nn.Module):
    """Computes down(activation(gate(x)) * up(x)) in two products with a kernel between them."""

    def __init__(self, gate_up: MergedLinear, down: MergedLinear, activation: Any) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the MLP for `[..., hidden]`. If there is a `residual`, the result is added to it in place."""
        inner = self.activation(self.gate_up(x))
        return self.down(inner) if residual is None else self.down.add_to(residual, inner)


class GpuGatedMlpRewrite(Rewrite):
    """Rewrites a module of `gate_proj`, `up_proj`, `down_proj` and an activation. The trial shows which activation."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) - {"act_fn"} != set(GATED_PROJECTIONS):
            return
        layers = _plain_linears(module, GATED_PROJECTIONS)
        if layers is not None:
            gate_up, down = MergedLinear(*layers[:2]), MergedLinear(layers[2])
            for activation in ACTIVATIONS:
                yield GpuGatedMlp(gate_up, down, activation)


class GpuAttention(torch.nn.Module):
    """Attention with one product for queries, keys and values. One kernel rotates queries and keys and writes pages."""

    def __init__(
        self,
        projections: tuple[MergedLinear, MergedLinear],  # q/k/v, and o
        *,
        layer_index: int,
        head_dim: int,
        head_counts: tuple[int, int],  # query heads, KV heads
        norms: HeadNorms | None,
        scoring: Scoring,
    ) -> None:
        super().__init__()
        self.qkv, self.output = projections
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.query_heads, self.kv_heads = head_counts
        self.norms = norms
        self.scoring = scoring
        self.adds_in_place = False  # whether the result may be added to the residual in place

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
        """Computes attention with the interface of `attention.MergedAttention.forward`."""
        heads = self.qkv(hidden_states[0]).view(-1, self.query_heads + 2 * self.kv_heads, self.head_dim)
        tables = position_embeddings[0][0], position_embeddings[1][0]
        attended = self._in_one_launch(heads, tables, quire_step)
        if attended is None:
            query, key, value = turned(heads, tables, self.query_heads, self.norms)
            attended = quire_step.attend(self.layer_index, query, key, value, self.scoring)
        rows = attended.reshape(1, heads.shape[0], -1)
        if residual is not None and self.adds_in_place and residual.is_contiguous():
            return self.output.add_to(residual, rows), None
        return self.output(rows, residual), None

    def _in_one_launch(
        self, heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor | None:
        """Rotates and appends by `rotate_append`, then attends. Returns None if step or pages do not allow this."""
        if not isinstance(step, PagedStep):
            return None
        layer = step.layers[self.layer_index]
        plan = step.plans[layer.kind]
        if not isinstance(plan, TritonAttentionPlan) or not layer.is_written or not plan.spec.is_plain:
            return None
        query = plan.turn_and_append(heads, *tables, layer.pages, self.norms)
        return plan.attend(
            query,
            layer.pages,
            scale=self.scoring.scale,
            window_left=-1 if layer.window is None else layer.window - 1,
            soft_cap=self.scoring.soft_cap,
            sinks=self.scoring.sinks,
        )


class GpuAttentionRewrite(Rewrite):
    """Rewrites a module of q, k, v and o projections, with or without a norm of each query and key head."""

    def __init__(self, recording: Recording) -> None:
        """Takes the recording, because it has each layer's attention options."""
        self._recording = recording

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        names = child_names(module)
        if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
            return  # OLMo clips large elements; if the recorded inputs have none, a comparison would miss the clipping
        if own_parameter_names(module) or names - {"q_norm", "k_norm"} != set(PROJECTIONS):
            return
        layer_index, head_dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
        scoring = self._recording.scorings.get(layer_index) if isinstance(layer_index, int) else None
        layers = _plain_linears(module, PROJECTIONS)
        if scoring is None or layers is None or not isinstance(layer_index, int) or not isinstance(head_dim, int):
            return
        sizes = [layer.out_features for layer in layers[:3]]
        if sizes[1] != sizes[2] or any(size % head_dim for size in sizes):
            return
        projections = MergedLinear(*layers[:3]), MergedLinear(layers[3])
        for norms in _norms_of(module) if "q_norm" in names else [None]:
            yield GpuAttention(
                projections,
                layer_index=layer_index,
                head_dim=head_dim,
                head_counts=(sizes[0] // head_dim, sizes[1] // head_dim),
                norms=norms,
                scoring=scoring,
            )


def rewrite_for_gpu(module: torch.nn.Module, run: Callable[[Recording], object]) -> Rewritten:
    """Rewrites a model in place.

    Args:
        module: a transformers model for inference, on a device that runs the Triton kernels.
        run: makes the model compute one batch of a few tokens, with a step from `Recording.step`.
    """
    recording = Recording()
    with torch.inference_mode():
        recording.record(module, run)
        parts = (GpuAttentionRewrite(recording), GpuGatedMlpRewrite(), GpuNormRewrite())
        done = RewritePass(recording, parts, [DecoderLayerRewrite(LAYER_PARTS)])
        done.visit(module)
    for part in module.modules():  # Done last: in-place sums would have overwritten the recorded inputs.
        if isinstance(part, DecoderLayer):
            part.attention.adds_in_place = True
    return Rewritten(module, done.counts)


def turned(
    heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], query_heads: int, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits heads into queries, keys and values, and rotates queries and keys in plain torch.

    Args:
        heads: `[tokens, query_heads + 2 * kv_heads, head_dim]`.
        tables: cosine and sine, each `[tokens, rotary_dim]`.
        query_heads: number of query heads; they come first in `heads`.
        norms: norms of the heads, applied before the rotation.
    """
    kv_heads = (heads.shape[1] - query_heads) // 2
    query, key, value = heads.split([query_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        norm = gemma_rmsnorm if norms.offset else rmsnorm
        query, key = norm(query, norms.query, norms.eps), norm(key, norms.key, norms.eps)
    cosine, sine = (table[:, None] for table in tables)
    rotary_dim = cosine.shape[-1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = part.chunk(2, dim=-1)
        return torch.cat([part * cosine + torch.cat([-second, first], dim=-1) * sine, rest], dim=-1)

    return turn(query), turn(key), value


LAYER_PARTS = {
    "input_layernorm": GpuNorm,
    "self_attn": GpuAttention,
    "post_attention_layernorm": GpuNorm,
    "mlp": GpuGatedMlp,
}


def _plain_linears(module: torch.nn.Module, names: Sequence[str]) -> list[torch.nn.Linear] | None:
    layers = [layer for name in names if is_plain_linear(layer := module.get_submodule(name))]
    return layers if len(layers) == len(names) else None


def _norms_of(module: torch.nn.Module) -> Iterator[HeadNorms]:
    """Yields candidates for the norms of heads: with the weights as they are, and with 1 added to them."""
    query, key = (weight_and_epsilon(module.get_submodule(name)) for name in ("q_norm", "k_norm"))
    if query is None or key is None or query[1] != key[1]:
        return
    yield HeadNorms(query[0], key[0], query[1])
    yield HeadNorms(query[0], key[0], query[1], 1.0)
