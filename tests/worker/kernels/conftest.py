"""Skips the tests of the kernels if there is no Triton; `tests/worker/conftest.py` chooses their device."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # Triton has no wheels for this platform.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
