"""Runs the gateway as `python -m quire_gateway` and `quire-gateway`."""

from quire._descriptors import SERVER_THREADS_MIN, open_missing, require_open_files, require_threads
from quire._extras import require_extra_or_exit


def main() -> None:
    """Runs the gateway: the entry point of the command `quire-gateway`."""
    open_missing()
    require_open_files("quire-gateway")
    require_threads("quire-gateway", SERVER_THREADS_MIN)
    require_extra_or_exit("gateway")
    from quire_gateway.server import main as serve

    serve()


if __name__ == "__main__":
    main()
