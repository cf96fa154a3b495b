"""The gated MLP of Llama-like models (Shazeer, 2020): down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from quire_cpu.interface import PANEL
from quire_cpu.ops import PackedLinear

from quire_worker.model.adapters.sites import Site, is_active, site_of
from quire_worker.model.rewrites.interface import KernelRewrite, child_names, is_plain_linear, own_parameter_names
from quire_worker.model.rewrites.linear import packed_of

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


class GatedMlp(torch.nn.Module):
    """A gated MLP in two products. The first also computes activation(gate) * up, while its sums are in the cache."""

    def __init__(
        self, gate_up: PackedLinear, down: PackedLinear, sites: tuple[Site | None, Site | None, Site | None]
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.sites = sites  # the sites of the layers gate, up and down
        self._apart = gate_up.ungated()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the MLP for `[..., hidden]`, and adds `residual` if there is one."""
        if not any(map(is_active, self.sites)):
            return self.down(self.gate_up(x), residual)
        return self._adapted(x, residual)

    def _adapted(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Computes the MLP with adapters: they change gates and values before the activation, and the result."""
        panels = self._apart(x).view(-1, self._apart.outputs // PANEL, 2, PANEL // 2)
        gate, up = (panels[:, :, part].flatten(1)[:, : self.down.inputs] for part in (0, 1))
        for site, result in zip(self.sites, (gate, up), strict=False):
            if site is not None:
                site.add(x, result)
        activated = _ACTIVATIONS[str(self.gate_up.gate)](gate)
        between = (activated * up).view(*x.shape[:-1], -1)
        result = self.down(between, residual)
        if self.sites[2] is not None:
            self.sites[2].add(between, result)
        return result


class GatedMlpRewrite(KernelRewrite):
    """Rewrites a module of `gate_proj`, `up_proj`, `down_proj` and an activation.

    The candidates have SiLU and GELU (tanh approximation); the trial shows which one the module has.
    """

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) - {"act_fn"} != set(PROJECTIONS):
            return
        layers = [layer for name in PROJECTIONS if is_plain_linear(layer := module.get_submodule(name))]
        if len(layers) == len(PROJECTIONS):
            gate, up, down = layers
            sites = site_of(gate), site_of(up), site_of(down)
            gate_up, packed_down = packed_of(self._library, gate, up, gate="silu"), packed_of(self._library, down)
            yield GatedMlp(gate_up, packed_down, sites)
            yield GatedMlp(gate_up.gated_by("gelu_tanh"), packed_down, sites)
