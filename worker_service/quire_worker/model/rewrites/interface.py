"""Interface of a rewrite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeGuard

import torch
from quire_cpu.library import Library
from quire_cpu.ops import PackedLinear


class Rewrite(Protocol):
    """One pattern of modules, and the replacements that compute the same results."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yields possible replacements of a module, the likeliest first; none if it does not fit the pattern.

        Args:
            module: a module of the model; not changed.
        """
        ...


def stand_in(packed: PackedLinear) -> torch.Tensor:
    """Returns a placeholder for a weight that was packed: one NaN, expanded to the weight's shape.

    Some models read the device or dtype of a weight (Llama 4, HunYuan MoE). A model that computes with the weight gets
    NaN, and so fails the check of its logits.
    """
    return torch.full((1, 1), math.nan, dtype=packed.dtype).expand(packed.outputs, packed.inputs)


def child_names(module: torch.nn.Module) -> set[str]:
    """Returns the names of the modules directly in a module."""
    return {name for name, _ in module.named_children()}


def own_parameter_names(module: torch.nn.Module) -> set[str]:
    """Returns the names of the parameters directly in a module, without those of its children."""
    return {name for name, _ in module.named_parameters(recurse=False)}


def is_plain_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Returns whether a module is torch's own linear layer, with a weight that the kernels can pack.

    Subclasses of the layer, and quantised tensors as its weight, do not qualify.
    """
    if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
        return False
    weight = module.weight
    return weight.is_contiguous() and weight.shape[1] * weight.itemsize % 4 == 0


class KernelRewrite(Rewrite):
    """A rewrite whose replacements call kernels."""

    def __init__(self, library: Library) -> None:
        self._library = library
