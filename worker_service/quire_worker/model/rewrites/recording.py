"""Recording of all modules' inputs and outputs in one forward pass. Replacements are tried on these inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire_worker.model.states.state_pass import StatePass, StateProbe
from quire_worker.model.transformers_seam import Scoring, Step


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One call of a module."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any


class Recording:
    """The last call of every module of a model, and the attention options of each layer."""

    def __init__(self) -> None:
        self.calls: dict[torch.nn.Module, RecordedCall] = {}
        self.scorings: dict[int, Scoring] = {}  # by layer index

    def record(self, module: torch.nn.Module, run: Callable[[Recording], object]) -> None:
        """Runs a model and records the calls of all its modules.

        Args:
            module: the model.
            run: calls the model once, with a step from `step`.
        """

        def note(called: torch.nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
            self.calls[called] = RecordedCall(arguments, keywords, result)

        handles = [part.register_forward_hook(note, with_kwargs=True) for part in module.modules()]
        try:
            run(self)
        finally:
            for handle in handles:
                handle.remove()

    def step(self, inner: Step) -> RecordingStep:
        """Returns a step that records the layers' attention options."""
        return RecordingStep(inner, self)


@dataclass(frozen=True, slots=True, eq=False)
class RecordingStep:
    """Passes all calls on to another step, and records attention options."""

    inner: Step
    recording: Recording

    @property
    def states(self) -> StatePass | StateProbe | None:
        """Returns the states of the other step."""
        return self.inner.states

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Records the scoring, which is the same in every pass, then calls the other step."""
        self.recording.scorings[layer_index] = scoring
        return self.inner.attend(layer_index, query, key, value, scoring)
