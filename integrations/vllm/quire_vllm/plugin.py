"""The plugin for `vllm.general_plugins`. vLLM calls it in each of its processes if this package is installed.

The plugin changes nothing: `--scheduler-cls` chooses the scheduler, and engines with vLLM's own are not affected. In a
process that will use Quire's scheduler, it logs early the settings that this scheduler would refuse at its start.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from quire_vllm.releases import UnsupportedError, check_release

log = logging.getLogger("vllm.quire_vllm")  # inherits level and format from vLLM's logger


def register() -> None:
    """Warns if this process will use Quire and its vLLM release is untested or lacks a name."""
    if not is_meant(sys.argv, os.environ):
        return
    try:
        check_release()
    except UnsupportedError as error:
        log.warning("%s", error)


def is_meant(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether the command line or the environment names this package."""
    return any("quire_vllm." in each for each in arguments) or any(
        each.startswith("QUIRE_VLLM_") for each in environment
    )
