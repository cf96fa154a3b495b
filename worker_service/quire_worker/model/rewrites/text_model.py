"""A decoder and its vocabulary head, without what transformers' models do around them, which costs a small model more
than its layers do."""

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
    """head(decoder(tokens)), of the tokens whose logits are asked for alone."""

    def __init__(self, model: Decoder, lm_head: Linear | torch.nn.Linear, config: Any) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.config = config
        self._decoder, self._head = model, lm_head  # found without torch's look-up of children

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        quire_step: Step,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Does what a transformers model does for ids and positions `[1, tokens]`, and the int64 places of those tokens
        that need logits."""
        hidden = self._decoder.hidden_states(input_ids, position_ids, quire_step, logits_to_keep)
        return CausalLMOutputWithPast(logits=self._head.forward(self._decoder.norm.forward(hidden)))


class TextModelRewrite(Rewrite):
    """Knows a model of a rewritten decoder and a linear head, which stays torch's where others share its weight."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != {"model", "lm_head"}:
            return
        decoder, head = module.get_submodule("model"), module.get_submodule("lm_head")
        if type(decoder) is Decoder and type(head) in (Linear, torch.nn.Linear):
            yield TextModel(decoder, head, getattr(module, "config", None))  # type: ignore[arg-type]
