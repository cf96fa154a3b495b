"""The counted operations, and their counting: see `instructions.py`."""
