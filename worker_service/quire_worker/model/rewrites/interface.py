"""Interface of a rewrite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeGuard

import torch
from quire_cpu.library import Library
from quire_cpu.ops import PackedLinear


class Rewrite(Protocol):
    """One pattern of modules, and what computes the same. What it knows, it is given when it is made."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Returns what may replace a module, the likeliest first; nothing where it does not fit the pattern.

        Args:
            module: of the model; not changed.
        """
        ...


def stand_in(packed: PackedLinear) -> torch.Tensor:
    """Returns what a module has in the place of a weight that was packed, for models that ask it for its device or
    dtype (Llama 4, HunYuan MoE): a single NaN in its shape, so that one that computes with it does not pass the check
    of its logits."""
    return torch.full((1, 1), math.nan, dtype=packed.dtype).expand(packed.outputs, packed.inputs)


def child_names(module: torch.nn.Module) -> set[str]:
    """Names of the modules directly in a module."""
    return {name for name, _ in module.named_children()}


def own_parameter_names(module: torch.nn.Module) -> set[str]:
    """Names of the parameters directly in a module, not of those in its children."""
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_plain_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Tells whether it is a linear layer as torch has it, whose weight the kernels can pack: no layer of another class,
    and no weight that is a quantised tensor inside of torch's own layer."""
    if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
        return False
    weight = module.weight
    return weight.is_contiguous() and weight.shape[1] * weight.itemsize % 4 == 0


class KernelRewrite(Rewrite):
    """A rewrite whose replacements call kernels."""

    def __init__(self, library: Library) -> None:
        self._library = library
