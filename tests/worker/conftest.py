"""Chooses where tests run kernels: on the GPU if there is one, otherwise in Triton's interpreter on CPU tensors.

Triton chooses the interpreter when a function is decorated, so this must run before the first kernel is imported.
Another test of the same process may have imported Triton before (transformers does), so that Triton's own library is
not interpreted: its functions are decorated again. The choice holds for this process only; children do not inherit it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from quire_worker.attention import PagedAttention

from tests.worker.attention_batches import implementation

try:
    import triton
except ImportError:  # Triton has no wheels for this platform.
    triton = None


def use_interpreter() -> None:
    """Makes Triton interpret functions that are decorated from now on, and Triton's own library."""
    knobs = triton.knobs
    knobs.propagate_env, before = False, knobs.propagate_env
    knobs.runtime.interpret = True
    knobs.propagate_env = before
    import triton.language as tl

    for module in (tl.standard, tl.random):
        _decorate_again(module, places=(module, tl, tl.standard, tl.random, tl.core, tl.math))


def _decorate_again(module: ModuleType, *, places: tuple[Any, ...]) -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name, compiled in list(vars(module).items()):
        if not isinstance(compiled, JITFunction):
            continue
        interpreted = InterpretedFunction(compiled.fn)
        for place in places:
            if vars(place).get(name) is compiled:
                setattr(place, name, interpreted)
        tensor = triton.language.tensor
        if vars(tensor).get(name) is compiled:
            setattr(tensor, name, _as_method(interpreted))


def _as_method(interpreted: Any) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        return interpreted(*args, **kwargs)

    return method


if triton is not None and not torch.cuda.is_available():
    use_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Returns the device of the tensors of a kernel's test."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "cpu", "triton"])
def attention(request: pytest.FixtureRequest, device: torch.device) -> PagedAttention:
    """Yields every implementation of the worker's attention: the test runs for each."""
    return implementation(request.param, device)
