"""The operations that `instructions.py` counts, and the code that counts them."""
