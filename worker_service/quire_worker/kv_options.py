"""Choices of the command line's options, in a module without torch so that `--help` is fast."""

from __future__ import annotations

from typing import Final

KV_CACHE_DTYPES: Final = ("auto", "fp8_e4m3", "fp8_e5m2")  # defined in `page_format.py`
KV_LAYOUTS: Final = ("NHD", "HND")
UTILIZATION: Final = 0.9  # default share of a GPU's memory that the worker uses
