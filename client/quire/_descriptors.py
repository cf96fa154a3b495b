"""Standard input, output and error, where the parent of this process has closed them."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Puts /dev/null in the place of standard streams that are closed.

    Otherwise the first socket or file that is opened gets their numbers, and then libraries that write to "standard
    error" write into it. Call this before anything else is opened.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # as Python has it where the stream is closed
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
