"""Functions that FlashInfer lacks: compiling ahead, sampling from logits, copies of pages, and fused launches.

    from quire_kernels.extra import AttentionKind, warmup

Each name is imported when it is first used, because all of them need Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_kernels.compilation.kinds import AttentionKind, LatentKind
    from quire_kernels.compilation.warmup import count_compilations, warmup
    from quire_kernels.flashinfer.cascade_gains import cascade_gains
    from quire_kernels.ops.copy_blocks import copy_blocks
    from quire_kernels.ops.rotate_append import rotate_append
    from quire_kernels.ops.sampling import greedy, sample
    from quire_kernels.ops.swap_blocks import gather_blocks, scatter_blocks

__all__ = [
    "AttentionKind",
    "LatentKind",
    "cascade_gains",
    "copy_blocks",
    "count_compilations",
    "gather_blocks",
    "greedy",
    "rotate_append",
    "sample",
    "scatter_blocks",
    "warmup",
]

_MODULES = {
    "AttentionKind": "quire_kernels.compilation.kinds",
    "LatentKind": "quire_kernels.compilation.kinds",
    "cascade_gains": "quire_kernels.flashinfer.cascade_gains",
    "copy_blocks": "quire_kernels.ops.copy_blocks",
    "count_compilations": "quire_kernels.compilation.warmup",
    "gather_blocks": "quire_kernels.ops.swap_blocks",
    "greedy": "quire_kernels.ops.sampling",
    "rotate_append": "quire_kernels.ops.rotate_append",
    "sample": "quire_kernels.ops.sampling",
    "scatter_blocks": "quire_kernels.ops.swap_blocks",
    "warmup": "quire_kernels.compilation.warmup",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)
