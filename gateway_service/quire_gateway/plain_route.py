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
    """A route that calls an endpoint directly if its only parameter is the request.

    FastAPI would resolve the parameters for each request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the function that answers a request."""
        if len(inspect.signature(self.endpoint).parameters) == 1 and self.dependant.request_param_name is not None:
            endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
            return endpoint
        return super().get_route_handler()


def got(app: FastAPI, path: str, kind: type[Response] = JSONResponse) -> Callable[[EndpointT], EndpointT]:
    """Returns a decorator that serves a path for GET and HEAD.

    `/openapi.json` describes only GET, with the content type of `kind`.
    """

    def add(endpoint: EndpointT) -> EndpointT:
        app.get(path, response_class=kind)(endpoint)  # Routes are tried in order, so GET comes first.
        app.head(path, include_in_schema=False)(endpoint)
        return endpoint

    return add
