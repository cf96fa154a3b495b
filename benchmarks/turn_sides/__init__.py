"""What `turn.py` measures with."""
