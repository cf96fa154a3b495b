"""The workloads of `trees.py`, and Quire's side of it; its peers are those of `serving.py`."""
