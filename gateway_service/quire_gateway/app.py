"""The endpoints: who is asked for what. Each makes an `Ask` of a body, has it prepared, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from quire_gateway import asks, relay, replies
from quire_gateway.bodies import ChatBody, CompletionBody
from quire_gateway.failures import TOO_LARGE, ApiError, missing
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import GatewayCollector, Telemetry, exposition
from quire_gateway.serving import Served

NO_JSON: Final = "the body is no JSON"
PARAM_SHOWN: Final = 256  # characters of the place of a fault


def make_app(
    fleet: Fleet,
    telemetry: Telemetry,
    *,
    version: str,
    request_timeout_s: float,
    is_draining: Callable[[], bool],
) -> FastAPI:
    """Returns the endpoints as an ASGI application."""
    # Its pages would load scripts from elsewhere; /openapi.json has the same for programs.
    app = FastAPI(title="Quire", version=version, docs_url=None, redoc_url=None, redirect_slashes=False)
    collector = GatewayCollector(telemetry, fleet)

    async def answer(ask: asks.Ask, form: Callable[..., replies.Form], request: Request) -> Served:
        state = request.state
        call = await relay.prepare(
            fleet, ask, namespace=state.namespace, request_id=state.request_id, timeout_s=request_timeout_s
        )
        shape = form(state.request_id, int(time.time()), call.model.name, with_usage=ask.with_usage)
        return Served(fleet, call, shape, telemetry, state.started_s)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer(asks.of_completion(body), replies.CompletionForm, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await answer(asks.of_chat(body), replies.ChatForm, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(replies.models(fleet.models()))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(orjson.dumps(replies.model(*fleet.model(name))))

    @app.get("/healthz")
    @app.head("/healthz", include_in_schema=False)
    @app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)  # what probes of vLLM's server ask
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        if is_draining():
            raise ApiError(503, "the gateway is shutting down", kind="server_error", code="draining")
        fleet.check_ready()
        return PlainTextResponse("ok\n")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(collector), media_type=CONTENT_TYPE_LATEST)

    _put_errors_in_form(app)
    return app


def _put_errors_in_form(app: FastAPI) -> None:
    """Gives every error the form that callers know."""

    @app.exception_handler(ApiError)
    async def known(_request: Request, error: ApiError) -> Response:
        return _failed(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: RequestValidationError) -> Response:
        return _failed(_of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        what = {
            400: NO_JSON,
            404: f"Unknown request URL: {request.method} {request.url.path}",
            405: "Method Not Allowed",
        }
        code = TOO_LARGE if error.status_code == 413 else None
        failure = ApiError(error.status_code, what.get(error.status_code, str(error.detail)), code=code)
        failure.headers.update(error.headers or {})  # which methods there are
        return _failed(failure)


def _of_validation(found: Sequence[Any]) -> ApiError:
    """Returns what is wrong with a body, in one sentence about its first fault."""
    fault = found[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, NO_JSON)
    if fault["loc"] == ("body",) and isinstance(fault["input"], bytes):
        return ApiError(415, "the body is to be JSON, with Content-Type: application/json")
    if fault["loc"] == ("body",) and fault["type"] != "missing":
        return ApiError(400, "the body is to be a JSON object")
    where = [str(part) for part in fault["loc"] if part != "body" and not _is_of_a_union(part)]
    param = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in where).lstrip(".")[:PARAM_SHOWN] or None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if fault["type"] == "missing":
        return missing(param)
    message = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)


def _is_of_a_union(part: object) -> bool:
    """Tells whether a place names an alternative of a type, which no caller has written."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "bool", "StreamOptions"))


def _failed(error: ApiError) -> Response:
    return Response(
        orjson.dumps(error.body), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
