"""Runs the gateway: `python -m quire_gateway`."""

from quire_gateway.server import main

main()
