"""Routes without FastAPI's search for an endpoint's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


class PlainRoute(APIRoute):
    """A route that calls an endpoint of a request alone as it is: FastAPI would look for its parameters each time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns what answers a request."""
        if len(inspect.signature(self.endpoint).parameters) == 1 and self.dependant.request_param_name is not None:
            endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
            return endpoint
        return super().get_route_handler()


def got(app: FastAPI, path: str, kind: type[Response] = JSONResponse) -> Callable[[EndpointT], EndpointT]:
    """Returns a decorator that serves a path for GET and for HEAD. The description for programs has GET alone,
    and of the answer's kind its content type.
    """

    def add(endpoint: EndpointT) -> EndpointT:
        app.get(path, response_class=kind)(endpoint)  # first, because routes are tried in their order
        app.head(path, include_in_schema=False)(endpoint)
        return endpoint

    return add
