"""Turns off the kernels for Hopper chips for a while, so that the older kernels can be timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SWITCH = "QUIRE_HOPPER"  # read at each launch of Quire's kernels; "0" selects the kernels for other chips


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Makes every launcher choose its kernel for other chips."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
