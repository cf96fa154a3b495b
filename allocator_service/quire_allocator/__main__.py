"""Runs the allocator as `python -m quire_allocator` and `quire-allocator`."""

from quire._descriptors import open_missing, require_open_files
from quire._extras import require_extra_or_exit


def main() -> None:
    """Checks the environment, and runs the allocator's process."""
    open_missing()
    require_open_files("quire-allocator")
    require_extra_or_exit("allocator")
    from quire_allocator.server import main as serve

    serve()


if __name__ == "__main__":
    main()
