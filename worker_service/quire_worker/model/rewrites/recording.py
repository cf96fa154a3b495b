"""What the modules of a model were given, and gave, in one forward pass: what their replacements are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any


class Recording:
    """The last call of every module of a model, and what each layer asked attention for."""

    def __init__(self) -> None:
        self.calls: dict[torch.nn.Module, Call] = {}
        self.attention_options: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # by layer index

    def record(self, module: torch.nn.Module, run: Callable[[Recording], object]) -> None:
        """Runs a model and notes every call in it.

        Args:
            module: the model.
            run: calls it once, with a step of `step`.
        """

        def note(called: torch.nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
            self.calls[called] = Call(arguments, keywords, result)

        handles = [part.register_forward_hook(note, with_kwargs=True) for part in module.modules()]
        try:
            run(self)
        finally:
            for handle in handles:
                handle.remove()

    def step(self, inner: Any) -> RecordingStep:
        """A step (`transformers_seam.Step`) that notes what layers ask it for beside queries, keys and values."""
        return RecordingStep(inner, self)


@dataclass(frozen=True, slots=True, eq=False)
class RecordingStep:
    """Hands everything to another step."""

    inner: Any
    recording: Recording

    def attend(self, layer_index: int, query: Any, key: Any, value: Any, *options: Any, **keywords: Any) -> Any:
        """Notes the options, which are the same in every pass."""
        self.recording.attention_options[layer_index] = options, keywords
        return self.inner.attend(layer_index, query, key, value, *options, **keywords)
