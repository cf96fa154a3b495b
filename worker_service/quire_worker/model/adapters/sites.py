"""Sites of adapters in a model: linear layers that see all tokens of a flat batch in order.

Life of a model's sites:

    1. found      in the model's first pass: layers that are called with `[1, tokens, inputs]`. A layer has no site if
                  it is never called, or sees the tokens in another shape (routers, experts)
    2. passed on  to the kernels that replace a layer (`rewrites`). They call `add` themselves
    3. hooked     into layers that are still transformers' own, before the first pass with an adapter. Passes before it
                  run without hooks

A pass says in `during` which adapter each token uses. Passes do not overlap. A layer adds two products for each adapter
of the pass, over that adapter's tokens together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quire_worker.model.adapters.adapter import Segment
from quire_worker.model.checkpoint import UnsupportedModelError

_ATTRIBUTE = "adapter_site"  # of a linear layer


class Site:
    """One linear layer, whatever computes it by now."""

    __slots__ = ("_sites", "inputs", "name", "outputs")

    def __init__(self, sites: Sites, name: str, layer: torch.nn.Linear) -> None:
        self.name = name
        self.inputs, self.outputs = layer.in_features, layer.out_features
        self._sites = sites

    @property
    def is_active(self) -> bool:
        """Tells whether the pass under way has adapters, of this layer or others."""
        return bool(self._sites.segments)

    def add(self, x: torch.Tensor, result: torch.Tensor) -> None:
        """Adds what adapters change to a layer's result, in place.

        Args:
            x: `[..., inputs]`, all tokens of the pass.
            result: `[..., outputs]`; two-dimensional, or contiguous.

        Raises:
            UnsupportedModelError: these are not the tokens of the pass.
        """
        segments = self._sites.segments
        if not segments:
            return
        rows = x.reshape(-1, self.inputs)
        if rows.shape[0] != self._sites.token_count:
            raise UnsupportedModelError(f"layer {self.name} sees other tokens than the pass has, so no adapter can be")
        results = result if result.dim() == 2 else result.view(-1, self.outputs)
        for adapter, tokens in segments:
            factors = adapter.factors.get(self.name)
            if factors is not None:
                change = rows[tokens].to(factors.down.dtype) @ factors.down.T @ factors.up.T
                results[tokens] = (results[tokens] + change).to(result.dtype)


class Sites:
    """All of a model.

    Attributes:
        by_name: as the model names its layers.
        segments: of the pass under way.
        token_count: of the pass under way.
    """

    def __init__(self, module: Any) -> None:
        """Finds nothing yet; see `finding`."""
        self.by_name: dict[str, Site] = {}
        self.segments: Sequence[Segment] = ()
        self.token_count = 0
        self._module = module
        self._is_hooked = False

    @contextmanager
    def finding(self, token_count: int) -> Iterator[None]:
        """Watches a pass of so many tokens, and makes a site of each layer that sees them."""
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
        """Is one pass, of so many tokens."""
        if segments and not self._is_hooked:
            self._hook()
        self.segments, self.token_count = segments, token_count
        try:
            yield
        finally:
            self.segments = ()

    @contextmanager
    def narrowed(self, tokens: slice | torch.Tensor) -> Iterator[None]:
        """Is a part of a pass in which layers see these of its tokens only, in this order."""
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
    """Returns the site of a linear layer; None where it has none."""
    site: Site | None = getattr(layer, _ATTRIBUTE, None)
    return site


def is_active(site: Site | None) -> bool:
    """Tells whether a layer's result has to be given to its site."""
    return site is not None and site.is_active
