"""The parts of `scripts/gpu_proof.py`. Each part is a process, `python -m proof_sides.NAME`.

rows          writes a part's results
goals         checks the rows against the goals
machine correctness text tests kernels serving   the parts
pytest_rows   a pytest plugin that writes a row for each test
"""
