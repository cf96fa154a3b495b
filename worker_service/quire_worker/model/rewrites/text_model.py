"""A decoder and its vocabulary head, without transformers' code around them.

In a small model that code costs more time than the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire_worker.model.rewrites.decoder import Decoder
from quire_worker.model.rewrites.interface import Rewrite, child_names, own_parameter_names
from quire_worker.model.rewrites.linear import Linear
from quire_worker.model.transformers_seam import Step


class TextModel(torch.nn.Module):
    """Computes head(decoder(tokens)), only for the tokens that need logits."""

    def __init__(self, model: Decoder, lm_head: Linear | torch.nn.Linear, config: Any) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.config = config
        self._decoder, self._head = model, lm_head  # plain attributes, because torch looks up submodules slowly

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        quire_step: Step,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Computes logits with the interface of a transformers model.

        Args:
            input_ids: int64 `[1, tokens]`.
            position_ids: int64 `[1, tokens]`.
            logits_to_keep: int64, indices of the tokens that need logits.
            quire_step: the forward pass.
        """
        hidden = self._decoder.hidden_states(input_ids, position_ids, quire_step, logits_to_keep)
        return CausalLMOutputWithPast(logits=self._head.forward(self._decoder.norm.forward(hidden)))


class TextModelRewrite(Rewrite):
    """Rewrites a model of a rewritten decoder and a linear head. The head may be torch's, if its weight is shared."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != {"model", "lm_head"}:
            return
        decoder, head = module.get_submodule("model"), module.get_submodule("lm_head")
        if type(decoder) is Decoder and type(head) in (Linear, torch.nn.Linear):
            yield TextModel(decoder, head, getattr(module, "config", None))  # type: ignore[arg-type]
