"""The kernels for Hopper chips, left out for a while: what they replaced can then be timed beside them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

PACKAGE = "quire_kernels"
CHOICES = ("runs_on_hopper", "fits_hopper")  # functions that say whether a launcher takes such a kernel


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Has every launcher take the kernel that it takes on other chips."""
    changed = []
    for name, module in list(sys.modules.items()):
        for choice in CHOICES if name.split(".")[0] == PACKAGE else ():
            if hasattr(module, choice):
                changed.append((module, choice, getattr(module, choice)))
    for module, choice, _ in changed:
        setattr(module, choice, lambda *_, **__: False)
    try:
        yield
    finally:
        for module, choice, before in changed:
            setattr(module, choice, before)


def are_there() -> bool:
    """Tells whether there is any such kernel."""
    return any(
        hasattr(module, choice)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == PACKAGE
        for choice in CHOICES
    )
