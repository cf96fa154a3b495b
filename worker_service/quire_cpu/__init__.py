"""Kernels for CPUs in C++, behind a plain C interface: attention over pages, linear layers, norms, rotary embedding.

    build       compiles `csrc/` once for each instruction set, into one shared library
    library     finds the library or compiles it, and loads it; if that fails, reports the reason
    interface   the structures of `csrc/quire_cpu.h` for ctypes
    ops         norms, rotary embedding, linear layers and the greedy choice, called with tensors; the worker calls
                attention and the loop over layers itself, because it owns their pages

The library does not depend on torch: it gets pointers, sizes and strides, so one build serves every torch release.
Loading the library picks the best instruction set: AVX2, AVX-512, or AVX-512 with bfloat16. Other CPUs run the
compiler's baseline of the same source (NEON on ARM).
"""

from importlib.metadata import version


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return version("quire-kv")
