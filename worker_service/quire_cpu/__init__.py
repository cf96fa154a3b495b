"""Kernels for CPUs in C++, behind a plain C interface: attention over pages, linear layers, norms, rotary embedding.

    build       compiles `csrc/`: once for each instruction set, into one shared library
    library     finds the library or has it made, and loads it; says why where neither can be done
    interface   the structures of `csrc/quire_cpu.h`, as ctypes has them
    ops         norms, rotary embedding, linear layers and the greedy choice, called with tensors; attention and the
                loop over layers are called by the worker, which has their pages

Nothing in the library knows torch: it gets pointers, sizes and strides, so one build serves every release. Loading the
library picks the instruction set among AVX2, AVX-512, AVX-512 with bfloat16, and the compiler's baseline of the same
source elsewhere (NEON on ARM).
"""

from importlib.metadata import version


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return version("quire-kv")
