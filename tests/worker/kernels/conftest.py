"""Tests of the kernels, where there is Triton; where they run is said in `tests/worker/conftest.py`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # no wheels for this platform
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
