"""The measurements of `benchmarks/kernels.py`, on a CPU and on a GPU."""
