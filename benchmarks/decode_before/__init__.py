"""The kernels before the change, to compare."""
