"""The measuring parts of `turn.py`."""
