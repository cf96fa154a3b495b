"""Runs the allocator as `python -m quire_allocator`."""

from quire_allocator.server import main

main()
