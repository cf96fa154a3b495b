"""Logits of a model without pages, ranks or kernels. At load, logits with pages, ranks or kernels are compared to them.

In half precision, two correct computations of the same logits can differ by more than any fixed share. If rounding
changes the choice of experts, or a layer amplifies it, the logits of some checkpoints move by half of their norm.
Therefore the effect of rounding alone is measured: each module's results are changed at random by less than their last
bit, and the logits are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from quire_worker.model.transformers_seam import ATTENTION_NAME

CHECK_TOKENS = 24  # tokens of each sequence
ROUNDINGS = 4  # number of computations with changed rounding

# Allowed difference of logits, as a share of their norm. A lost mask or state moves logits by tens of percent.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}

_QUIET = 0.2  # share of the tolerance: with kernels, differences were up to four times as large as with pages alone
_ROUNDING_MARGIN = 2.0  # factor on the measured effect, because a few computations do not find the largest effect


@dataclass(frozen=True, slots=True, eq=False)
class OwnLogits:
    """Logits of transformers' own attention after each of two sequences."""

    logits: torch.Tensor  # float32 [2, vocabulary]
    rounding: float = 0.0  # effect of rounding, as a share of the logits' norm; 0: not measured

    def difference(self, logits: torch.Tensor) -> float:
        """Returns the norm of the difference to other logits, as a share of these logits' norm."""
        return float((logits - self.logits).norm() / self.logits.norm())

    @property
    def rounding_bound(self) -> float:
        """Returns the largest difference that may still be rounding."""
        return _ROUNDING_MARGIN * self.rounding


def may_be_rounding(logits: torch.Tensor, own: OwnLogits, dtype: torch.dtype) -> bool:
    """Returns whether logits in half precision differ so much that the effect of rounding should be measured.

    Measure this effect before kernels replace modules. Afterwards it cannot be measured.
    """
    return dtype != torch.float32 and own.difference(logits) > _QUIET * TOLERANCES[dtype]


def check_texts(vocab_size: int, max_position: int) -> tuple[list[int], list[int]]:
    """Returns two token sequences of equal length for the comparison."""
    first = [(7 * i + 1) % vocab_size for i in range(min(CHECK_TOKENS, max_position))]
    return first, first[::-1]


def own_logits_of(module: Any, texts: tuple[list[int], list[int]]) -> OwnLogits:
    """Returns the logits of transformers' own attention after each of the two sequences."""
    return OwnLogits(_logits(module, texts))


def with_rounding(own: OwnLogits, module: Any, texts: tuple[list[int], list[int]]) -> OwnLogits:
    """Returns `own` with the measured effect of rounding on it.

    Args:
        own: logits of the module.
        module: transformers' module, unchanged since it computed `own`.
        texts: the inputs of `own`.
    """
    random = torch.Generator().manual_seed(0)

    def round_otherwise(_module: Any, _given: Any, result: Any) -> Any:
        if not (isinstance(result, torch.Tensor) and result.is_floating_point()):
            return result
        moved_by = (torch.rand(result.shape, generator=random) - 0.5) * torch.finfo(result.dtype).eps
        return (result.float() * (1 + moved_by.to(result.device))).to(result.dtype)

    hooks = [part.register_forward_hook(round_otherwise) for part in module.modules() if not any(part.children())]
    try:
        others = [_logits(module, texts).to(own.logits.device) for _ in range(ROUNDINGS)]
    finally:
        for hook in hooks:
            hook.remove()
    return replace(own, rounding=max(own.difference(other) for other in others))


def _logits(module: Any, texts: tuple[list[int], list[int]]) -> torch.Tensor:
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = module(torch.tensor(texts, device=module.device), use_cache=False).logits[:, -1]
            return logits.float()
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
