"""The checkpoints and texts of `speculation.py`, and the worker that serves them."""
