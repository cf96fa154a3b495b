"""The loop over the layers, without the masks, caches and hooks that transformers' models prepare around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire_worker.model.rewrites.decoder_layer import DecoderLayer
from quire_worker.model.rewrites.interface import child_names, own_parameter_names
from quire_worker.model.rewrites.norm import Norm

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

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, quire_step: Any, **_: Any
    ) -> BaseModelOutputWithPast:
        """As a transformers model of this kind, for ids and positions `[1, tokens]`."""
        hidden = self.embed_tokens(input_ids)
        tables = self.rotary_emb(hidden, position_ids=position_ids)
        for layer in self._in_order:
            hidden = layer.forward(hidden, position_embeddings=tables, quire_step=quire_step)
        return BaseModelOutputWithPast(last_hidden_state=self.norm.forward(hidden))


class DecoderRewrite:
    """Knows a model of just these parts whose layers and last norm are rewritten already."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != set(PARTS):
            return
        embedding, layers, norm, rotary = (module.get_submodule(name) for name in PARTS)
        known = [layer for layer in layers.children() if type(layer) is DecoderLayer]
        if len(known) == len(list(layers.children())) and type(norm) is Norm:
            yield Decoder(embedding, known, norm, rotary)
