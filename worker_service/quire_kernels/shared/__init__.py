"""The common parts of several kernels: tiles, launches, the paged cache, options, and the float64 reference."""
