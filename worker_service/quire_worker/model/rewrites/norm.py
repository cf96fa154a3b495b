"""RMSNorm in one kernel; transformers runs six operators, since it converts to float32 and back on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from quire_cpu import ops
from quire_cpu.library import Library

from quire_worker.model.rewrites.interface import KernelRewrite, child_names, own_parameter_names


class Norm(torch.nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight."""

    def __init__(self, library: Library, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.library = library
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Takes `[..., size]` to the same."""
        return ops.norm(self.library, hidden_states, self.weight, self.epsilon)


class NormRewrite(KernelRewrite):
    """Knows a module of one vector and an epsilon. The vector may be counted from 0 or, as Gemma's, from 1."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        found = weight_and_epsilon(module)
        if found is not None:
            weight, epsilon = found
            yield Norm(self._library, weight, epsilon)
            yield Norm(self._library, weight + 1, epsilon)


def weight_and_epsilon(module: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Returns the vector and the epsilon of a module that may be an RMSNorm; None if it cannot be one."""
    if child_names(module) or own_parameter_names(module) != {"weight"}:
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float):  # perhaps a linear layer, of whatever kind of weight
        return None
    weight = module.get_parameter("weight").detach()
    return (weight, epsilon) if weight.dim() == 1 else None
