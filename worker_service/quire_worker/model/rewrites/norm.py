"""RMSNorm in one kernel. transformers runs six operators for it, because it converts to float32 and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from quire_cpu import ops
from quire_cpu.library import Library

from quire_worker.model.rewrites.interface import KernelRewrite, child_names, own_parameter_names


class Norm(torch.nn.Module):
    """Computes x / sqrt(mean(x^2) + epsilon) * weight."""

    def __init__(self, library: Library, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.library = library
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Computes the norm over the last dimension of `[..., size]`."""
        return ops.norm(self.library, hidden_states, self.weight, self.epsilon)


class NormRewrite(KernelRewrite):
    """Rewrites a module of one vector and an epsilon. The vector is the weight, or the weight - 1 as in Gemma."""

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
    if not isinstance(epsilon, float):  # the module is of another kind with a weight, such as a linear layer
        return None
    weight = module.get_parameter("weight").detach()
    return (weight, epsilon) if weight.dim() == 1 else None
