"""The gated layer of Llama's kind (Shazeer, 2020): down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from quire_cpu.ops import PackedLinear

from quire_worker.model.rewrites.interface import KernelRewrite, child_names, is_plain_linear, own_parameter_names
from quire_worker.model.rewrites.linear import packed_of

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class GatedMlp(torch.nn.Module):
    """Two products; the first ends in activation(gate) * up, computed while its sums are in the cache."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Takes `[..., hidden]` to the same, plus `residual` if there is one."""
        return self.down(self.gate_up(x), residual)


class GatedMlpRewrite(KernelRewrite):
    """Knows a module of `gate_proj`, `up_proj`, `down_proj` and an activation. Whether that is SiLU, or GELU as tanh
    approximates it, shows when both are tried."""

    def candidates(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if own_parameter_names(module) or child_names(module) - {"act_fn"} != set(PROJECTIONS):
            return
        layers = [layer for name in PROJECTIONS if is_plain_linear(layer := module.get_submodule(name))]
        if len(layers) == len(PROJECTIONS):
            gate, up, down = layers
            gate_up, packed_down = packed_of(self._library, gate, up, gate="silu"), packed_of(self._library, down)
            yield GatedMlp(gate_up, packed_down)
            yield GatedMlp(gate_up.gated_by("gelu_tanh"), packed_down)
