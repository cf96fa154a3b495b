"""The name under which Quire is installed, its version, and the commands that install an extra.

The name is not published on the package index. Until it is, a package of that name there is not ours, so messages name
a clone and a wheel.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

NAME: Final = "quire-kv"

try:
    VERSION: Final = version(NAME)
except PackageNotFoundError:  # a source tree on PYTHONPATH
    VERSION: Final = "0+uninstalled"  # type: ignore[misc]


def how_to_install(extra: str) -> str:
    """Returns the commands that install an extra, such as "worker": in a clone, and with a wheel."""
    return f"in a clone, pip install '.[{extra}]'; with a wheel, pip install './FILE.whl[{extra}]'"
