"""A linear layer by itself: its weights packed once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from quire_cpu.library import Library
from quire_cpu.ops import PackedLinear

from quire_worker.model.adapters.sites import Site, site_of
from quire_worker.model.rewrites.interface import KernelRewrite, is_plain_linear, stand_in


class Linear(torch.nn.Module):
    """x @ weight^T + bias on a packed weight."""

    def __init__(self, packed: PackedLinear, site: Site | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.weight = stand_in(packed)
        self.site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes `[..., inputs]` to `[..., outputs]`."""
        result = self.packed(x)
        if self.site is not None:
            self.site.add(x, result)
        return result


class LinearRewrite(KernelRewrite):
    """Knows `torch.nn.Linear` itself. A weight that another module has, too, is left alone: packed, it would be in
    memory twice."""

    def __init__(self, library: Library, shared: set[int]) -> None:
        """Takes the addresses of weights that several modules share."""
        super().__init__(library)
        self._shared = shared

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if is_plain_linear(module) and module.weight.data_ptr() not in self._shared:
            yield Linear(packed_of(self._library, module), site_of(module))


def packed_of(library: Library, *layers: torch.nn.Linear, gate: str | None = None) -> PackedLinear:
    """Returns the weights of linear layers with one input, packed together."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
    return PackedLinear(library, weights, biases, gate=gate)
