"""Runs the worker as `python -m quire_worker`."""

from quire_worker.server import main

main()
