"""Packages that each server needs beyond the client's. A check finds missing ones before any is imported."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

from quire._distribution import how_to_install
from quire.errors import UsageError

PACKAGES: Final = {
    "allocator": ("cryptography", "numpy", "prometheus_client", "structlog", "uvloop"),
    "worker": (
        "cryptography",
        "jinja2",
        "llguidance",
        "numpy",
        "prometheus_client",
        "safetensors",
        "structlog",
        "tokenizers",
        "torch",
        "transformers",
    ),
    "gateway": (
        "cryptography",
        "fastapi",
        "httptools",
        "orjson",
        "prometheus_client",
        "structlog",
        "uvicorn",
        "uvloop",
    ),
}


def require_extra(server: str) -> None:
    """Checks that a server's packages are installed, without loading them.

    Raises:
        UsageError: some are not installed.
    """
    missing = [name for name in PACKAGES[server] if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the {server} needs packages that are not installed ({', '.join(missing)}): {how_to_install(server)}"
        )


def require_extra_or_exit(server: str) -> None:
    """Checks that a server's packages are installed. If some are missing, prints one sentence and exits with 2."""
    try:
        require_extra(server)
    except UsageError as error:
        print(f"quire-{server}: {error}", file=sys.stderr)  # noqa: T201 - same as argparse's own errors
        sys.exit(2)
