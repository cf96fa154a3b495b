"""vLLM's entry point `vllm.general_plugins`, which it calls in each of its processes once this package is installed.

It changes nothing, and leaves engines with their own scheduler alone: `--scheduler-cls` chooses the scheduler. It
reports early, in the log of a process that will need it, what that scheduler would refuse at its start.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from quire_vllm.releases import UnsupportedError, check_release

log = logging.getLogger("vllm.quire_vllm")  # inherits level and format from vLLM's logger


def register() -> None:
    """Warns if this process will run on Quire and its release of vLLM was not tested, or lacks a name."""
    if not is_meant(sys.argv, os.environ):
        return
    try:
        check_release()
    except UnsupportedError as error:
        log.warning("%s", error)


def is_meant(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tells whether the command line or the environment names this package."""
    return any("quire_vllm." in each for each in arguments) or any(
        each.startswith("QUIRE_VLLM_") for each in environment
    )
