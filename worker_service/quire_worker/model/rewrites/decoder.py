"""The loop over the layers, without the masks, caches and hooks that transformers' models prepare around it.

If the kernels support every layer, all layers run in one call of `quire_decoder`, each on the pages and the block
tables of its group. The one call replaces ten calls from Python per layer. More important: it releases the interpreter
lock, so the event loop can hand out the last tokens at the same time.

A prompt needs logits only after its last token. So the last layer skips all other tokens after its attention.
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
from quire_worker.model.rewrites.recording import RecordingStep
from quire_worker.model.rewrites.rotary_tables import RotaryTables, Turns
from quire_worker.model.transformers_seam import PagedStep, Step

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


class Decoder(torch.nn.Module):
    """Computes norm(layers(embed(tokens))), with one table of cosines and sines for all layers."""

    def __init__(
        self, embed_tokens: torch.nn.Module, layers: list[DecoderLayer], norm: Norm, rotary_emb: torch.nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.rotary_emb = rotary_emb
        self._tables = RotaryTables(rotary_emb)
        self._in_order = layers
        self._in_c = LayersInC.of(layers)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, quire_step: Step, **_: Any
    ) -> BaseModelOutputWithPast:
        """Computes the last hidden states like a transformers model. Ids and positions are `[1, tokens]`."""
        hidden = self.hidden_states(input_ids, position_ids, quire_step)
        return BaseModelOutputWithPast(last_hidden_state=self.norm.forward(hidden))

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: Step, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the output of the last layer before the last norm, `[1, tokens, hidden_size]`.

        If `kept` is given (int64 `[kept]`, rising), the result has only these tokens.
        """
        if kept is not None and kept.shape[0] == input_ids.shape[1]:
            kept = None
        hidden: torch.Tensor = self.embed_tokens.forward(input_ids).contiguous()
        turns = self._tables.turns(hidden, position_ids)
        is_adapted = any(map(is_active, self._in_order[0].attention.sites))
        computed = None if is_adapted or self._in_c is None else self._in_c.run(step, hidden, turns, kept)
        if computed is not None:
            return computed
        tables = turns.of_tokens
        for layer in self._in_order:
            hidden = layer.forward(hidden, position_embeddings=tables, quire_step=step)
        return hidden if kept is None else hidden[:, kept]


class LayersInC:
    """Descriptions of layers of one shape, as `quire_decoder` reads them."""

    def __init__(self, layers: list[DecoderLayer], described: ctypes.Array[interface.Layer]) -> None:
        self._layers = layers
        self._kinds = [_kind_of(layer.attention) for layer in layers]
        self._described = described
        self._memory = torch.empty(0)  # intermediate results of the kernels, reused by every pass

    @classmethod
    def of(cls, layers: list[DecoderLayer]) -> LayersInC | None:
        """Returns the description of these layers, or None if their shapes differ."""
        shapes = {
            (a.qkv.outputs, a.query_heads, a.kv_heads, a.head_dim, layer.mlp.gate_up.outputs)
            for layer in layers
            for a in [layer.attention]
        }
        return None if len(shapes) > 1 else cls(layers, _described(layers))

    def run(self, step: Step, hidden: torch.Tensor, turns: Turns, kept: torch.Tensor | None) -> torch.Tensor | None:
        """Runs all layers, in place on `hidden`: `[1, tokens, hidden_size]`, contiguous and not used elsewhere.

        Returns the rows of the tokens `kept`, or all rows. Returns None without computing anything if the plan of a
        layer is not one of the kernels' plans.
        """
        step = step.inner if isinstance(step, RecordingStep) else step
        if not isinstance(step, PagedStep) or not self._bind(step):
            return None
        first, tokens = self._layers[0], hidden.shape[1]
        attention, sizes = first.attention, (hidden.shape[2], first.attention.qkv.outputs,
                                             first.attention.output.inputs, first.mlp.gate_up.outputs)  # fmt: skip
        if self._memory.numel() < tokens * sum(sizes):
            self._memory = torch.empty(tokens * sum(sizes), dtype=hidden.dtype)
        places, place = [], self._memory.data_ptr()
        for size in sizes:
            places.append(place)
            place += tokens * size * hidden.itemsize
        kept_count = tokens if kept is None else kept.shape[0]
        positions = 0 if turns.positions is None else turns.positions.data_ptr()
        arguments = interface.Decoder(
            self._described, len(self._layers), hidden.data_ptr(), *places, turns.cosine.data_ptr(),
            turns.sine.data_ptr(), positions, 0 if kept is None else kept.data_ptr(), turns.cosine.stride(0), tokens,
            kept_count, hidden.shape[2], attention.query_heads, attention.kv_heads, attention.head_dim,
            turns.cosine.shape[1], interface.DTYPES[hidden.dtype],
        )  # fmt: skip
        if step.before_kernels is not None:
            step.before_kernels()
        attention.library.functions.quire_decoder(ctypes.byref(arguments))
        return hidden if kept is None else hidden[:, :kept_count]

    def _bind(self, step: PagedStep) -> bool:
        """Points every layer to its pages and its group's batch. Returns False if the kernels do not support a plan."""
        batches: dict[tuple[int, Kind], Any] = {}
        for described, layer, kind in zip(self._described, self._layers, self._kinds, strict=True):
            attention = layer.attention
            own = step.layers[attention.layer_index]
            plan = step.plans[own.kind]
            if not isinstance(plan, CpuAttentionPlan) or own.window != attention.scoring.sliding_window:
                return False
            if (own.kind, kind) not in batches:
                batches[own.kind, kind] = ctypes.pointer(plan.arguments_of(kind))
            described.pages, described.page_stride = own.pages.data_ptr(), own.pages.stride(0)
            described.attend = batches[own.kind, kind]
            described.slots = plan.batch.slot_mapping.data_ptr() if own.is_written else 0
        return True


class DecoderRewrite(Rewrite):
    """Rewrites a model that has these parts and no other parts. The model's layers and last norm must be rewritten
    already.
    """

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != set(PARTS):
            return
        embedding, layers, norm, rotary = (module.get_submodule(name) for name in PARTS)
        known = [layer for layer in layers.children() if type(layer) is DecoderLayer]
        if known and len(known) == len(list(layers.children())) and type(norm) is Norm:
            yield Decoder(embedding, known, norm, rotary)


def _described(layers: list[DecoderLayer]) -> ctypes.Array[interface.Layer]:
    found = (interface.Layer * len(layers))()
    for described, layer in zip(found, layers, strict=True):
        attention, norms = layer.attention, layer.attention.norms
        described.qkv, described.output = _packed(attention.qkv), _packed(attention.output)
        described.gate_up, described.down = _packed(layer.mlp.gate_up), _packed(layer.mlp.down)
        described.attention_norm = layer.attention_norm.weight.data_ptr()
        described.mlp_norm = layer.mlp_norm.weight.data_ptr()
        described.attention_epsilon, described.mlp_epsilon = layer.attention_norm.epsilon, layer.mlp_norm.epsilon
        described.sinks = 0 if attention.sinks is None else attention.sinks.data_ptr()
        if norms is not None:
            described.query_norm, described.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            described.head_epsilon = norms.epsilon
    return found


def _kind_of(attention: MergedAttention) -> Kind:
    scoring = attention.scoring
    window_left = -1 if scoring.sliding_window is None else scoring.sliding_window - 1
    return Kind(attention.query_heads, scoring.scale, window_left, scoring.soft_cap)


def _packed(layer: PackedLinear) -> interface.Packed:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return interface.Packed(layer.weight.data_ptr(), bias, layer.inputs, layer.outputs, interface.GATES[layer.gate])
