"""Routes without FastAPI's search for an endpoint's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


class PlainRoute(APIRoute):
    """A route that calls an endpoint of a request alone as it is: FastAPI would look for its parameters each time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns what answers a request."""
        if len(inspect.signature(self.endpoint).parameters) == 1 and self.dependant.request_param_name is not None:
            endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
            return endpoint
        return super().get_route_handler()
