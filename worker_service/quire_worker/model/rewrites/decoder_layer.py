"""A decoder layer of two halves. Each half is a norm, a part, and a residual sum that the part's last product adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire_worker.model.rewrites.attention import MergedAttention
from quire_worker.model.rewrites.gated_mlp import GatedMlp
from quire_worker.model.rewrites.interface import Rewrite, child_names, own_parameter_names
from quire_worker.model.rewrites.norm import Norm
from quire_worker.model.transformers_seam import Step

# Names of the parts, each with the class that replaces it on CPUs.
PARTS: dict[str, type[torch.nn.Module]] = {
    "input_layernorm": Norm,
    "self_attn": MergedAttention,
    "post_attention_layernorm": Norm,
    "mlp": GatedMlp,
}


class DecoderLayer(torch.nn.Module):
    """Computes x = x + attention(norm(x)), then x = x + mlp(norm(x))."""

    def __init__(self, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> None:
        """Takes the four parts. `attention` and `mlp` must accept a residual and add it to their result."""
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        quire_step: Step,
        **_: Any,
    ) -> torch.Tensor:
        """Computes the layer for hidden states `[1, tokens, hidden]`; the result has the same shape."""
        attended = self.attention.forward(
            self.attention_norm.forward(hidden_states), position_embeddings, None, hidden_states, quire_step=quire_step
        )[0]
        return self.mlp.forward(self.mlp_norm.forward(attended), attended)


class DecoderLayerRewrite(Rewrite):
    """Rewrites a layer of exactly these parts. All parts must be rewritten already."""

    def __init__(self, parts: Mapping[str, type[torch.nn.Module]] = PARTS) -> None:
        """Takes the classes of the rewritten parts, by the parts' names."""
        self._parts = parts

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) != set(self._parts):
            return
        parts: list[Any] = [module.get_submodule(name) for name in self._parts]
        if all(type(part) is kind for part, kind in zip(parts, self._parts.values(), strict=True)):
            yield DecoderLayer(*parts)
