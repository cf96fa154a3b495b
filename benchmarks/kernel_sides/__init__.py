"""What `benchmarks/kernels.py` measures, on a CPU and on a GPU."""
