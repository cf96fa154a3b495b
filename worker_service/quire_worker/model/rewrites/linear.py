"""A single linear layer, with its weight packed once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from quire_cpu.library import Library
from quire_cpu.ops import PackedLinear

from quire_worker.model.adapters.sites import Site, site_of
from quire_worker.model.rewrites.interface import KernelRewrite, is_plain_linear, stand_in


class Linear(torch.nn.Module):
    """Computes x @ weight^T + bias from a packed weight."""

    def __init__(self, packed: PackedLinear, site: Site | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.weight = stand_in(packed)
        self.site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layer: `[..., inputs]` to `[..., outputs]`."""
        result = self.packed(x)
        if self.site is not None:
            self.site.add(x, result)
        return result


class LinearRewrite(KernelRewrite):
    """Rewrites `torch.nn.Linear`, unless another module shares its weight: the packed copy would be a second one."""

    def __init__(self, library: Library, shared: set[int]) -> None:
        """Takes the addresses of weights that several modules share."""
        super().__init__(library)
        self._shared = shared

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if is_plain_linear(module) and module.weight.data_ptr() not in self._shared:
            yield Linear(packed_of(self._library, module), site_of(module))


def packed_of(library: Library, *layers: torch.nn.Linear, gate: str | None = None) -> PackedLinear:
    """Packs the weights of linear layers that have the same input into one product."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
    return PackedLinear(library, weights, biases, gate=gate)
