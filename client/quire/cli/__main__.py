"""Runs the `quire` command as `python -m quire.cli`."""

from quire.cli import main

main()
