"""The sides of `end_to_end.py`: transformers in a process of its own, and the model that both sides serve."""
