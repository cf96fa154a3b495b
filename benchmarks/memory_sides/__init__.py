"""The sides of `memory.py`: traffic through the scheduler and a pool, and sequences of hybrid models that fit."""
