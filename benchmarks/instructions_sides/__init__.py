"""What is counted, and what counts it: see `instructions.py`."""
