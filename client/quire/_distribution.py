"""The name of the installed package, its version, and the commands that install an extra.

Quire is not published on the package index. A package of that name there is a different one, so messages show how to
install from a clone or a wheel.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

NAME: Final = "quire-kv"

try:
    VERSION: Final = version(NAME)
except PackageNotFoundError:  # the package is a source tree on PYTHONPATH
    VERSION: Final = "0+uninstalled"  # type: ignore[misc]


def how_to_install(extra: str) -> str:
    """Returns the commands that install an extra, such as "worker", from a clone and from a wheel."""
    return f"in a clone, pip install '.[{extra}]'; with a wheel, pip install './FILE.whl[{extra}]'"
