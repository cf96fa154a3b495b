"""The kernels: one per file, with its launcher and its reference."""
