"""Runs the worker as `python -m quire_worker` and `quire-worker`.

Help, wrong options, missing packages, missing files and occupied ports are answered before torch is loaded, because
loading torch takes seconds.
"""

import os
import sys

from quire._descriptors import SERVER_THREADS_MIN, open_missing, require_open_files, require_threads
from quire._extras import require_extra_or_exit
from quire.errors import UsageError


def main() -> None:
    """Checks options and files, then starts the server."""
    open_missing()
    require_open_files("quire-worker")
    require_threads("quire-worker", SERVER_THREADS_MIN)
    require_extra_or_exit("worker")
    from quire_worker.process import preflight
    from quire_worker.process.options import parse_arguments

    options = parse_arguments()
    try:
        if os.environ.get("RANK", "0") == "0":
            preflight.check(options)
        else:  # only rank 0 opens ports
            preflight.check_files(options)
    except (UsageError, preflight.ModelError) as error:
        print(f"quire-worker: {error}", file=sys.stderr)  # noqa: T201 - a usage error, as argparse prints its own
        sys.exit(2)
    from quire_worker.process.server import main as serve

    serve()


if __name__ == "__main__":
    main()
