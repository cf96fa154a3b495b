"""The endpoints: who is asked for what. Each makes an `Ask` of a body, has it prepared, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from quire_gateway import asks, relay, replies, texts
from quire_gateway.bodies import Body, ChatBody, CompletionBody
from quire_gateway.branches.endpoints import BODIES as BRANCH_BODIES
from quire_gateway.branches.endpoints import serve_branches
from quire_gateway.failures import ApiError
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import GatewayCollector, Telemetry, exposition
from quire_gateway.reading import Reader
from quire_gateway.responses.bodies import ResponseBody
from quire_gateway.responses.endpoints import serve_responses
from quire_gateway.responses.store import Store
from quire_gateway.serving import Served
from quire_gateway.texts import DetokenizeBody, TokenizeBody
from quire_gateway.work import Work, described

PATH_SHOWN: Final = 256  # characters of one that there is not
BodyT = TypeVar("BodyT", bound=Body)


def make_app(
    fleet: Fleet,
    telemetry: Telemetry,
    store: Store,
    *,
    version: str,
    request_timeout_s: float,
    is_draining: Callable[[], bool],
) -> FastAPI:
    """Returns the endpoints as an ASGI application."""
    # Its pages would load scripts from elsewhere; /openapi.json has the same for programs.
    app = FastAPI(title="Quire", version=version, docs_url=None, redoc_url=None, redirect_slashes=False)
    collector = GatewayCollector(telemetry, fleet)

    work = Work(fleet, telemetry, Reader(), request_timeout_s)

    async def answer(
        request: Request,
        kind: type[BodyT],
        ask_of: Callable[[BodyT], asks.Ask],
        form: Callable[..., replies.Form],
    ) -> Served:
        state = request.state
        ask = await work.read(request, kind, ask_of)
        call = await relay.prepare(
            fleet, ask, namespace=state.namespace, request_id=state.request_id, timeout_s=request_timeout_s
        )
        shape = form(state.request_id, int(time.time()), call.model.name, with_usage=ask.with_usage)
        return Served(fleet, call, shape, telemetry, state.started_s)

    @app.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody, asks.of_completion, replies.CompletionForm)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatBody, asks.of_chat, replies.ChatForm)

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

    _serve_models(app, fleet)
    serve_responses(app, work, store)
    serve_branches(app, work)
    _serve_texts(app, work)
    _serve_overview(app, version)
    _put_errors_in_form(app)
    _describe_bodies(app)
    return app


def _serve_models(app: FastAPI, fleet: Fleet) -> None:
    """Adds the lists of models."""

    @app.get("/v1/models")
    @app.head("/v1/models", include_in_schema=False)
    async def models() -> Response:
        return _json(replies.models(fleet.models()))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(orjson.dumps(replies.model(*fleet.model(name))))


def _serve_texts(app: FastAPI, work: Work) -> None:
    """Adds the endpoints of tokens, as vLLM has them."""

    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        asked = await work.read(request, TokenizeBody, texts.of_tokenize)
        return _json(orjson.dumps(await texts.tokenized(work.fleet, asked)))

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        asked = await work.read(request, DetokenizeBody, lambda body: body)
        return _json(orjson.dumps(await texts.detokenized(work.fleet, asked)))


def _serve_overview(app: FastAPI, version: str) -> None:
    """Adds what says what there is."""

    @app.get("/")
    @app.head("/", include_in_schema=False)
    async def root() -> Response:
        paths = sorted({route.path for route in app.routes if isinstance(route, APIRoute)} - {"/"})
        return _json(orjson.dumps({"name": "quire-gateway", "version": version, "paths": paths}))

    @app.get("/version")
    @app.head("/version", include_in_schema=False)
    async def version_of() -> Response:
        return _json(orjson.dumps({"version": version}))


def _describe_bodies(app: FastAPI) -> None:
    """Puts the fields of bodies into the description for programs."""
    kinds: list[tuple[type[BaseModel], Any]] = [
        (kind, "validation")
        for kind in (CompletionBody, ChatBody, ResponseBody, TokenizeBody, DetokenizeBody, *BRANCH_BODIES)
    ]
    _, found = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    make = app.openapi

    def openapi() -> dict[str, Any]:
        described = make()
        described.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _put_errors_in_form(app: FastAPI) -> None:
    """Gives every error the form that callers know."""

    @app.exception_handler(ApiError)
    async def known(_request: Request, error: ApiError) -> Response:
        return _failed(error)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        called = f"{request.method} {request.url.path[:PATH_SHOWN]}"
        what = {404: f"Unknown request URL: {called}", 405: f"{called} is not allowed"}
        failure = ApiError(error.status_code, what.get(error.status_code, str(error.detail)))
        failure.headers.update(error.headers or {})  # which methods there are
        return _failed(failure)


def _failed(error: ApiError) -> Response:
    return Response(
        orjson.dumps(error.body), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
