"""The specialisations that ship: which kernels exist, for which dtypes and sizes, with how many warps and stages.

Each kernel's file declares its own, a tuple `CONFIGURATIONS` beside the launcher that uses the same numbers. Here they
are described and collected, for the compile check (`scripts/compile_kernels.py`).

A kernel can be launched for any ratio of heads, page size and head dim, so nobody can compile all of it. What is
declared is

- every dtype that a launcher takes (float32 too: it is multiplied without tensor cores, and slower);
- every size of tile that a launcher can choose, with all options at once, at the largest head dims that get it;
- head dims 64 to 256, 5, 7 and other query heads per KV head, and pages of 1, 16 and 64, each once without options.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Shared memory that one program may use, in bytes.
SHARED_MEMORY_MAX = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
ARCHITECTURES = tuple(SHARED_MEMORY_MAX)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "u8": 1}  # by Triton's names; u8 is e4m3 as bytes


@dataclass(frozen=True, slots=True, eq=False)
class KernelConfiguration:
    """One specialisation of one kernel.

    Raises:
        ValueError: an argument of the kernel has neither a type nor a value, or a name is none of its arguments.
    """

    kernel: Any  # what @triton.jit made
    name: str  # unique among the kernel's, such as "bf16 D128"
    signature: Mapping[str, str]  # type of each run-time argument: "*bf16", "i32", "i64", "fp32"
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()  # arguments known to be divisible by 16
    num_warps: int = 4
    num_stages: int = 3
    architectures: tuple[str, ...] = ARCHITECTURES

    def __post_init__(self) -> None:
        arguments = list(self.kernel.arg_names)
        given = [*self.signature, *self.constexprs]
        if sorted(arguments) != sorted(given):
            raise ValueError(f"{self.kernel.__name__} takes {sorted(arguments)}, {self.name} gives {sorted(given)}")
        if not self.aligned <= set(self.signature):
            raise ValueError(f"aligned: {sorted(self.aligned - set(self.signature))} are no run-time arguments")

    @property
    def title(self) -> str:
        """Kernel and name, unique among all."""
        return f"{self.kernel.__name__.strip('_')} {self.name}"


def unique(configurations: Iterable[KernelConfiguration]) -> tuple[KernelConfiguration, ...]:
    """Each title once: several choices may lead to one specialisation."""
    return tuple({configuration.title: configuration for configuration in configurations}.values())


def collect() -> list[KernelConfiguration]:
    """The configurations of every module of this package, by module and in the order of their declaration.

    Raises:
        ValueError: two have the same title.
    """
    package = importlib.import_module("quire_kernels")
    found: list[KernelConfiguration] = []
    modules = [module.name for module in pkgutil.walk_packages(package.__path__, "quire_kernels.")]
    for name in sorted(modules, key=lambda name: name.rpartition(".")[2]):
        found += getattr(importlib.import_module(name), "CONFIGURATIONS", ())
    titles = [configuration.title for configuration in found]
    twice = sorted({title for title in titles if titles.count(title) > 1})
    if twice:
        raise ValueError(f"configurations declared twice: {twice}")
    return found
