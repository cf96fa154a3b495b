"""Compiles a model's kernels before its first request, and counts compilations.

A kernel is compiled once per combination of dtypes, compile-time values (head dims, ratio of heads, page size, present
options) and divisibility of strides. Lengths, batch sizes and window sizes cause no compilation. The number of query
rows per request selects one of three block sizes. `warmup` runs every combination of a model once on a tiny batch.
Afterwards `count_compilations` should count 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from quire_kernels.compilation.kinds import AttentionKind, LatentKind, Step, steps_of
from quire_kernels.ops.sampling import greedy, sample

WORKSPACE_BYTES = 256 << 20

# The arguments are the number of steps done, the number of all steps, and the next step's description.
Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class CompilationCount:
    """The compilations during a `with` block."""

    kernels: list[str] = field(default_factory=list)  # the kernel's name, once per compilation

    @property
    def count(self) -> int:
        """Counts how many kernels were compiled."""
        return len(self.kernels)


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts Triton's compilations inside the block, including loads from its disk cache; 0 in the interpreter.

    Other hooks are still called. Only one thread may count at a time.
    """
    found = CompilationCount()
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(**arguments: Any) -> Any:
        found.kernels.append(getattr(arguments.get("fn"), "name", "kernel"))
        return before(**arguments) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        runtime.jit_post_compile_hook = before


def warmup(
    kinds: Sequence[AttentionKind | LatentKind],
    device: torch.device | str,
    *,
    logits_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> CompilationCount:
    """Runs every kernel call of every kind of layer once, with every block size.

    The calls cover contiguous queries, keys and values. Views are covered if their addresses are aligned to 16 bytes
    and their strides are multiples of 16. If a head dim is not a multiple of 16, the views' strides must not be
    multiples of 16, either. A model that plans a layer in several ways (with and without a mask, causal and not) needs
    a kind for each way. `merge_states`, `packbits` in big bit order, and caches that are pairs of 4-D tensors are not
    covered.

    Args:
        kinds: the kinds of the model's layers, without repetition.
        device: the device that will run the model.
        logits_dtype: dtype of the logits for `sample` and `greedy`; None: they are not compiled.
        progress: called before each step, and once at the end, with the number of steps done, the number of all steps,
            and the next step's description.

    Returns:
        The count of compilations.

    Raises:
        ValueError: a kind's numbers do not fit each other.
    """
    device = torch.device(device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    steps: list[Step] = [step for kind in dict.fromkeys(kinds) for step in steps_of(kind, workspace)]
    if logits_dtype is not None:
        steps.append(("sampling", lambda: _sample(torch.zeros(1, 64, dtype=logits_dtype, device=device))))
    with count_compilations() as found:
        for done, (title, step) in enumerate(steps):
            if progress is not None:
                progress(done, len(steps), title)
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return found


def _sample(logits: torch.Tensor) -> None:
    greedy(logits)
    sample(logits, torch.zeros(1, device=logits.device))
