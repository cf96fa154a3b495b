"""What several kernels share: tiles, launches, the paged cache, options, and the float64 reference."""
