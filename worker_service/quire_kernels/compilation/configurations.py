"""Descriptions of kernel specializations: chip, dtypes, sizes, warps and stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Bytes of shared memory that one program may use.
SHARED_MEMORY_MAX = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
ARCHITECTURES = tuple(SHARED_MEMORY_MAX)
# Bytes per element, by Triton's type names. Chips without fp8 types use bytes: u8 is e4m3, i8 is e5m2 (`shared.fp8`).
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "fp8e5": 1, "u8": 1, "i8": 1}
FP8_TYPES = {"sm_80": ("u8", "i8"), "sm_90": ("fp8e4nv", "fp8e5"), "gfx942": ("u8", "i8")}  # e4m3 and e5m2


@dataclass(frozen=True, slots=True, eq=False)
class KernelConfiguration:
    """One specialization of one kernel.

    Raises:
        ValueError: an argument of the kernel has neither a type nor a value, or a name is not an argument of the
            kernel.
    """

    kernel: Any  # the object that @triton.jit or @gluon.jit returned
    name: str  # unique per kernel, such as "bf16 D128"
    signature: Mapping[str, str]  # type of each run-time argument: "*bf16", "i32", "i64", "fp32", "tensordesc<...>"
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()  # arguments known to be divisible by 16
    num_warps: int = 4
    num_stages: int = 3
    architectures: tuple[str, ...] = ARCHITECTURES
    has_products_in_flight: bool = True  # for Gluon: each group of warps overlaps its products with its exponentials
    maxnreg: int | None = None  # registers per thread at the start, if warps later redistribute registers

    def __post_init__(self) -> None:
        arguments = list(self.kernel.arg_names)
        given = [*self.signature, *self.constexprs]
        if sorted(arguments) != sorted(given):
            raise ValueError(f"{self.kernel.__name__} takes {sorted(arguments)}, but {self.name} gives {sorted(given)}")
        if not self.aligned <= set(self.signature):
            raise ValueError(f"aligned: {sorted(self.aligned - set(self.signature))} are not run-time arguments")

    @property
    def is_gluon(self) -> bool:
        """Returns whether the kernel is written in Gluon. Gluon kernels are for one architecture."""
        return bool(self.kernel.is_gluon())

    @property
    def title(self) -> str:
        """Returns the kernel's and the specialization's name, which together are unique."""
        return f"{self.kernel.__name__} {self.name}"


def unique(configurations: Iterable[KernelConfiguration]) -> tuple[KernelConfiguration, ...]:
    """Returns the first configuration of each title, in order."""
    return tuple({configuration.title: configuration for configuration in configurations}.values())
