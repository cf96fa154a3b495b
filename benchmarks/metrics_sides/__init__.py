"""The parts of `metrics.py`: servers whose metrics and log lines are timed."""
