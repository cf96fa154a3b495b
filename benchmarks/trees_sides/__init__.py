"""The workloads of `trees.py`, and Quire's side of it. Its peers are the ones of `serving.py`."""
