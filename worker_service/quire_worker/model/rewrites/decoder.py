"""The loop over the layers, without the masks, caches and hooks that transformers' models prepare around it.

Where every layer goes straight to the kernels, and all have one plan and no option of attention but a scale, they run
in one call of `quire_decoder`. That saves ten calls from Python a layer; more than that, while it runs the model's
thread needs nothing of the interpreter, so that the event loop can hand out the last tokens meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from quire_cpu import interface
from quire_cpu.ops import PackedLinear
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire_worker.attention.cpu_path import CpuAttentionPlan, Kind
from quire_worker.model.adapters.sites import is_active
from quire_worker.model.rewrites.attention import MergedAttention
from quire_worker.model.rewrites.decoder_layer import DecoderLayer
from quire_worker.model.rewrites.interface import Rewrite, child_names, own_parameter_names
from quire_worker.model.rewrites.norm import Norm
from quire_worker.model.transformers_seam import PagedStep, Scoring, Step

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


class Decoder(torch.nn.Module):
    """norm(layers(embed(tokens))), with one table of cosines and sines for all layers."""

    def __init__(
        self, embed_tokens: torch.nn.Module, layers: list[DecoderLayer], norm: Norm, rotary_emb: torch.nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.rotary_emb = rotary_emb
        self._in_order = layers
        self._in_c = _layers_in_c(layers)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, quire_step: Step, **_: Any
    ) -> BaseModelOutputWithPast:
        """Does what a transformers model of this kind does, for ids and positions `[1, tokens]`."""
        hidden = self.embed_tokens(input_ids).contiguous()
        tables = self.rotary_emb(hidden, position_ids=position_ids)
        in_one_call = self._bound(quire_step)
        if in_one_call is not None:
            self._run_in_c(hidden, tables, *in_one_call)
        else:
            for layer in self._in_order:
                hidden = layer.forward(hidden, position_embeddings=tables, quire_step=quire_step)
        return BaseModelOutputWithPast(last_hidden_state=self.norm.forward(hidden))

    def _bound(self, step: Step) -> tuple[CpuAttentionPlan, list[torch.Tensor]] | None:
        """Returns the plan and the pages of all layers. None where these have several plans, or one that is not the
        kernels', where one of them sees a window or reads what another wrote, or where the pass has adapters."""
        if (
            self._in_c is None
            or not isinstance(step, PagedStep)
            or any(map(is_active, self._in_order[0].attention.sites))
        ):
            return None
        bound = [step.layers[layer.attention.layer_index] for layer in self._in_order]
        plan = step.plans[bound[0].kind]
        if not isinstance(plan, CpuAttentionPlan):
            return None
        if any(layer.kind != bound[0].kind or layer.window is not None or not layer.is_written for layer in bound):
            return None
        return plan, [layer.pages for layer in bound]

    def _run_in_c(
        self,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        plan: CpuAttentionPlan,
        pages: list[torch.Tensor],
    ) -> None:
        """Runs all layers, on `hidden` where it is: `[1, tokens, hidden_size]`, contiguous and this pass's own."""
        first = self._in_order[0]
        attention, mlp, tokens = first.attention, first.mlp, hidden.shape[1]
        assert self._in_c is not None
        for layer, own in zip(self._in_c, pages, strict=True):
            layer.pages, layer.page_stride = own.data_ptr(), own.stride(0)
        normed = torch.empty_like(hidden)
        between = [
            torch.empty(tokens, size, dtype=hidden.dtype)
            for size in (attention.qkv.outputs, attention.output.inputs, mlp.gate_up.outputs)
        ]
        cosine, sine = tables
        arguments = interface.Decoder(
            self._in_c, len(self._in_c), hidden.data_ptr(), normed.data_ptr(), *(each.data_ptr() for each in between),
            ctypes.pointer(plan.arguments_of(Kind(attention.query_heads, 0.0, -1, 0.0))),
            plan.batch.slot_mapping.data_ptr(), cosine.data_ptr(), sine.data_ptr(), cosine.stride(1), tokens,
            hidden.shape[2], attention.query_heads, attention.kv_heads, attention.head_dim, cosine.shape[2],
            interface.DTYPES[hidden.dtype],
        )  # fmt: skip
        attention.library.functions.quire_decoder(ctypes.byref(arguments))


class DecoderRewrite(Rewrite):
    """Knows a model of just these parts whose layers and last norm are rewritten already."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != set(PARTS):
            return
        embedding, layers, norm, rotary = (module.get_submodule(name) for name in PARTS)
        known = [layer for layer in layers.children() if type(layer) is DecoderLayer]
        if known and len(known) == len(list(layers.children())) and type(norm) is Norm:
            yield Decoder(embedding, known, norm, rotary)


def _layers_in_c(layers: list[DecoderLayer]) -> ctypes.Array[interface.Layer] | None:
    """Returns what `quire_decoder` reads of the layers; None where their shapes differ, or one asks for more than a
    scale."""
    shapes = {
        (a.qkv.outputs, a.query_heads, a.kv_heads, a.head_dim, layer.mlp.gate_up.outputs)
        for layer in layers
        for a in [layer.attention]
    }
    if len(shapes) > 1 or any(_scale_of(each.attention) is None for each in layers):
        return None
    found = (interface.Layer * len(layers))()
    for described, layer in zip(found, layers, strict=True):
        attention, norms = layer.attention, layer.attention.norms
        described.qkv, described.output = _packed(attention.qkv), _packed(attention.output)
        described.gate_up, described.down = _packed(layer.mlp.gate_up), _packed(layer.mlp.down)
        described.attention_norm = layer.attention_norm.weight.data_ptr()
        described.mlp_norm = layer.mlp_norm.weight.data_ptr()
        described.attention_epsilon, described.mlp_epsilon = layer.attention_norm.epsilon, layer.mlp_norm.epsilon
        described.scale = _scale_of(attention)
        if norms is not None:
            described.query_norm, described.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            described.head_epsilon = norms.epsilon
    return found


def _scale_of(attention: MergedAttention) -> float | None:
    """Returns what a layer asks attention for, if that is a scale and nothing else."""
    scoring = attention.scoring
    is_scale_alone = scoring == Scoring(scoring.scale, sliding_window=None, soft_cap=0.0, sinks=None)
    return scoring.scale if is_scale_alone else None


def _packed(layer: PackedLinear) -> interface.Packed:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return interface.Packed(layer.weight.data_ptr(), bias, layer.inputs, layer.outputs, layer.is_gated)
