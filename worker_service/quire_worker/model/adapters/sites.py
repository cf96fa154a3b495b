"""Sites of adapters in a model: linear layers that see all tokens of a flat batch in order.

Life of a model's sites:

    1. found      in the model's first pass: layers that are called with `[1, tokens, inputs]`. A layer has no site if
                  it is never called, or gets the tokens in another shape (routers, experts)
    2. passed on  to the kernels that replace a layer (`rewrites`). These kernels call `add` themselves
    3. hooked     into layers that are still transformers' own, before the first pass with an adapter. Earlier passes
                  run without hooks

Each pass runs inside `during`, which gets the adapters of the tokens. Passes do not overlap. For each adapter of the
pass, a layer computes two products over all tokens of that adapter, and adds the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quire_worker.model.adapters.adapter import Segment
from quire_worker.model.checkpoint import UnsupportedModelError

_ATTRIBUTE = "adapter_site"  # the attribute of a linear layer that holds its site


class Site:
    """One linear layer of a model, whether transformers or a kernel computes it."""

    __slots__ = ("_sites", "inputs", "name", "outputs")

    def __init__(self, sites: Sites, name: str, layer: torch.nn.Linear) -> None:
        self.name = name
        self.inputs, self.outputs = layer.in_features, layer.out_features
        self._sites = sites

    @property
    def is_active(self) -> bool:
        """Returns whether the pass under way has adapters, for this layer or for other layers."""
        return bool(self._sites.segments)

    def add(self, x: torch.Tensor, result: torch.Tensor) -> None:
        """Adds the adapters' changes to a layer's result, in place.

        Args:
            x: `[..., inputs]`, the layer's input for all tokens of the pass.
            result: `[..., outputs]`; two-dimensional, or contiguous.

        Raises:
            UnsupportedModelError: `x` has another number of tokens than the pass.
        """
        segments = self._sites.segments
        if not segments:
            return
        rows = x.reshape(-1, self.inputs)
        if rows.shape[0] != self._sites.token_count:
            raise UnsupportedModelError(
                f"the number of tokens in layer {self.name} differs from the pass, so adapters are not supported there"
            )
        results = result if result.dim() == 2 else result.view(-1, self.outputs)
        for adapter, tokens in segments:
            factors = adapter.factors.get(self.name)
            if factors is not None:
                change = rows[tokens].to(factors.down.dtype) @ factors.down.T @ factors.up.T
                results[tokens] = (results[tokens] + change).to(result.dtype)


class Sites:
    """All sites of a model.

    Attributes:
        by_name: sites by the layer's name in the model.
        segments: segments of the pass under way.
        token_count: tokens of the pass under way.
    """

    def __init__(self, module: Any) -> None:
        """Creates an empty set; a pass inside `finding` adds the sites."""
        self.by_name: dict[str, Site] = {}
        self.segments: Sequence[Segment] = ()
        self.token_count = 0
        self._module = module
        self._is_hooked = False

    @contextmanager
    def finding(self, token_count: int) -> Iterator[None]:
        """Watches a pass of `token_count` tokens, and creates a site for each layer that sees all tokens."""
        seen: dict[str, torch.nn.Linear] = {}
        apart = {self._module.get_input_embeddings(), self._module.get_output_embeddings()}

        def watch(name: str, layer: torch.nn.Linear) -> Any:
            def note(_: torch.nn.Module, arguments: tuple[Any, ...], __: Any) -> None:
                if arguments and arguments[0].shape == (1, token_count, layer.in_features):
                    seen[name] = layer

            return layer.register_forward_hook(note)

        layers = self._module.named_modules()
        hooks = [
            watch(name, layer) for name, layer in layers if isinstance(layer, torch.nn.Linear) and layer not in apart
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name, layer in seen.items():
            self.by_name[name] = site = Site(self, name, layer)
            setattr(layer, _ATTRIBUTE, site)

    @contextmanager
    def during(self, segments: Sequence[Segment], token_count: int) -> Iterator[None]:
        """Applies the segments' adapters in the pass that runs inside this context."""
        if segments and not self._is_hooked:
            self._hook()
        self.segments, self.token_count = segments, token_count
        try:
            yield
        finally:
            self.segments = ()

    @contextmanager
    def narrowed(self, tokens: slice | torch.Tensor) -> Iterator[None]:
        """Marks a part of a pass in which layers get only some of its tokens, in this order."""
        segments, token_count = self.segments, self.token_count
        if not segments:
            yield
            return
        places = torch.arange(token_count, device=segments[0].tokens.device)[tokens]
        parts = [(adapter, torch.isin(places, own).nonzero()[:, 0]) for adapter, own in segments]
        self.segments = [Segment(adapter, own) for adapter, own in parts if len(own)]
        self.token_count = len(places)
        try:
            yield
        finally:
            self.segments, self.token_count = segments, token_count

    def _hook(self) -> None:
        def add(layer: torch.nn.Module, arguments: tuple[Any, ...], result: torch.Tensor) -> None:
            getattr(layer, _ATTRIBUTE).add(arguments[0], result)

        for layer in self._module.modules():
            if hasattr(layer, _ATTRIBUTE):
                layer.register_forward_hook(add)
        self._is_hooked = True


def site_of(layer: torch.nn.Module) -> Site | None:
    """Returns the site of a linear layer; None if it has none."""
    site: Site | None = getattr(layer, _ATTRIBUTE, None)
    return site


def is_active(site: Site | None) -> bool:
    """Returns whether a layer has a site and the pass under way has adapters."""
    return site is not None and site.is_active
