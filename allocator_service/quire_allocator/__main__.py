"""Runs the allocator as `python -m quire_allocator` and `quire-allocator`."""

from quire._descriptors import SERVER_THREADS_MIN, open_missing, require_open_files, require_threads
from quire._extras import require_extra_or_exit


def main() -> None:
    """Checks the environment, and runs the allocator's process."""
    open_missing()
    require_open_files("quire-allocator")
    require_threads("quire-allocator", SERVER_THREADS_MIN)
    require_extra_or_exit("allocator")
    from quire_allocator.server import main as serve

    serve()


if __name__ == "__main__":
    main()
