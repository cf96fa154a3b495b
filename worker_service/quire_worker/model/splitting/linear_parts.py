"""Parts of linear layers, and modules that add up the results of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from quire_worker.ranks.crew import Crew


class Summed(torch.nn.Module):
    """A split module: its result, or the first of several results, is the sum of the ranks' results."""

    def __init__(self, inner: torch.nn.Module, crew: Crew) -> None:
        super().__init__()
        self.inner = inner
        self._crew = crew

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Computes this rank's part, and returns the sum over all ranks."""
        result = self.inner(*arguments, **keywords)
        if isinstance(result, torch.Tensor):
            return self._crew.add_up(result)
        return (self._crew.add_up(result[0]), *result[1:])

    def __getattr__(self, name: str) -> Any:
        """Returns attributes of the inner module, because models read some, such as a layer's kind."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@dataclass(slots=True)
class Split:
    """Changes that make a module one rank's part: other children and parameters, other numbers."""

    parts: dict[str, torch.nn.Module | torch.nn.Parameter] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def apply(self, module: torch.nn.Module) -> Split:
        """Changes the module, and returns the `Split` that restores it."""
        before = Split()
        for name, part in self.parts.items():
            before.parts[name] = getattr(module, name)
            setattr(module, name, part)
        for name, number in self.numbers.items():
            before.numbers[name] = getattr(module, name)
            setattr(module, name, number)
        return before


def is_plain(module: object) -> TypeGuard[torch.nn.Linear]:
    """Returns whether a module is a linear layer with a weight that can be cut. A quantised layer cannot be."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.is_floating_point()
    )


def some_outputs(linear: torch.nn.Linear, index: torch.Tensor) -> torch.nn.Linear:
    """Returns the part of a linear layer that computes some of its outputs. The weights are copied.

    Args:
        linear: the layer, with weight `[outputs, inputs]`.
        index: int64, indices of the outputs.
    """
    bias = None if linear.bias is None else linear.bias[index]
    return _linear(linear.weight[index], bias)


def some_inputs(linear: torch.nn.Linear, index: torch.Tensor, crew: Crew) -> torch.nn.Linear:
    """Returns the part of a linear layer that reads some of its inputs. Only rank 0 adds the bias.

    Args:
        linear: the layer, with weight `[outputs, inputs]`.
        index: int64, indices of the inputs.
        crew: the ranks whose results are added up.
    """
    return _linear(linear.weight[:, index], None if linear.bias is None else on_one_rank(linear.bias, crew))


def on_one_rank(bias: torch.Tensor, crew: Crew) -> torch.Tensor:
    """Returns the bias on rank 0 and zeros elsewhere, so that the sum over the ranks has it once."""
    return bias.clone() if crew.rank == 0 else torch.zeros_like(bias)


def span(length: int, crew: Crew) -> torch.Tensor:
    """Returns the indices of this rank's part of `length` elements, int64. The number of ranks must divide `length`."""
    each = length // crew.size
    return torch.arange(crew.rank * each, (crew.rank + 1) * each)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    part = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    part.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        part.bias = torch.nn.Parameter(bias, requires_grad=False)
    return part.eval()
