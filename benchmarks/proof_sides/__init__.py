"""The parts of `scripts/gpu_proof.py`, each `python -m proof_sides.NAME`, a process of its own.

rows          how a part writes what it found
goals         what was promised, read off the rows
machine correctness text tests kernels serving   the parts
pytest_rows   a plugin: a row for each test
"""
