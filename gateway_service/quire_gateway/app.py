"""The HTTP endpoints. Each endpoint turns a body into an `Ask`, has a worker prepare it, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from quire._serving.metrics import keeping_colons
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from quire_gateway import asks, listing, relay, replies, texts
from quire_gateway.bodies import Body, ChatBody, CompletionBody
from quire_gateway.branches.endpoints import BODIES as BRANCH_BODIES
from quire_gateway.branches.endpoints import serve_branches
from quire_gateway.caching.bodies import BODIES as CACHE_BODIES
from quire_gateway.caching.endpoints import serve_cache
from quire_gateway.description import complete, described
from quire_gateway.entries import Entry
from quire_gateway.failures import ApiError, defect
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Telemetry
from quire_gateway.plain_route import PlainRoute, got
from quire_gateway.reading import Reader, of_validation
from quire_gateway.responses.bodies import InputTokensBody, ResponseBody
from quire_gateway.responses.endpoints import serve_responses
from quire_gateway.responses.store import Store
from quire_gateway.serving import Served
from quire_gateway.stream_head import KEEP_ALIVE_S
from quire_gateway.texts import DetokenizeBody, TokenizeBody
from quire_gateway.work import Work

PATH_SHOWN: Final = 256  # characters of an unknown path that an error shows
# The gate counts requests already. FastAPI's telemetry would search for telemetry providers at each request.
_OFF: Final[Any] = {"tracing": False, "metrics": False, "logs": False}
BodyT = TypeVar("BodyT", bound=Body)
# Endpoints of OpenAI and vLLM for models that do not generate text.
POOLING_PATHS: Final = (
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify"),
    "/v1/moderations",
)


def make_app(
    fleet: Fleet,
    telemetry: Telemetry,
    store: Store,
    *,
    version: str,
    registry: CollectorRegistry,
    request_timeout_s: float,
    is_draining: Callable[[], bool],
    keep_alive_s: float = KEEP_ALIVE_S,
) -> FastAPI:
    """Returns the endpoints as an ASGI application."""
    # FastAPI's pages would load scripts from other servers; programs find the same data in /openapi.json.
    app = FastAPI(title="Quire", version=version, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_OFF)
    app.router.route_class = PlainRoute
    work = Work(fleet, telemetry, Reader(), request_timeout_s, keep_alive_s)

    async def answer(
        request: Request,
        kind: type[BodyT],
        ask_of: Callable[[BodyT], asks.Ask],
        form: Callable[..., replies.Form],
    ) -> Served:
        state = request.state
        ask = await work.read(request, kind, ask_of)
        call = await relay.prepare(
            fleet,
            ask,
            entry=state.entry,
            namespace=state.namespace,
            split_special_tokens=state.split_special_tokens,
            request_id=state.request_id,
            timeout_s=request_timeout_s,
        )
        shape = form(
            state.request_id,
            int(time.time()),
            call.model.name,
            with_usage=ask.with_usage,
            fingerprint=call.model.fingerprint,
            service_tier=ask.service_tier,
        )
        return Served(fleet, call, shape, telemetry, state.started_s, memory=state.memory, keep_alive_s=keep_alive_s)

    @app.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionBody, asks.of_completion, replies.CompletionForm)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatBody, asks.of_chat, replies.ChatForm)

    _serve_models(app, fleet)
    serve_responses(app, work, store)
    serve_branches(app, work)
    serve_cache(app, work)
    _serve_probes(app, fleet, is_draining)
    _serve_operators(app, fleet, telemetry, registry)
    _serve_texts(app, work)
    _refuse_pooling(app)
    _serve_overview(app, version)
    _put_errors_in_form(app)
    bodies = (CompletionBody, ChatBody, ResponseBody, InputTokensBody, TokenizeBody, DetokenizeBody)
    complete(app, (*bodies, *BRANCH_BODIES, *CACHE_BODIES))
    return app


def _refuse_pooling(app: FastAPI) -> None:
    """Refuses requests to endpoints that need an embedding model, which workers do not serve."""

    async def refuse(request: Request) -> Response:
        what = "is not supported: the workers only generate text, and compute no embeddings, scores or classes"
        raise ApiError(404, f"{request.url.path} {what}", code="unsupported_endpoint")

    for path in POOLING_PATHS:
        app.post(path, include_in_schema=False)(refuse)


def _serve_probes(app: FastAPI, fleet: Fleet, is_draining: Callable[[], bool]) -> None:
    """Adds the endpoints for health probes."""

    @got(app, "/healthz", PlainTextResponse)
    # Probes for vLLM's server use this path.
    @app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def healthz(_: Request) -> Response:
        return PlainTextResponse("")  # Prometheus accepts an empty text, so it can scrape this path, too.

    @got(app, "/readyz", PlainTextResponse)
    async def readyz(_: Request) -> Response:
        if is_draining():
            raise ApiError(503, "the gateway is shutting down", kind="server_error", code="draining")
        fleet.check_ready()
        return PlainTextResponse("")


def _serve_operators(app: FastAPI, fleet: Fleet, telemetry: Telemetry, registry: CollectorRegistry) -> None:
    """Adds the endpoints for operators, which show all callers. The gate demands the operator's token."""

    @got(app, "/metrics", PlainTextResponse)
    async def metrics(request: Request) -> Response:
        write, kind = choose_encoder(keeping_colons(request.headers.get("accept", "")))
        return Response(write(registry), media_type=kind)

    @got(app, "/requests")
    async def requests(_: Request) -> Response:
        return _json(orjson.dumps(await listing.listed(fleet, tuple(telemetry.entries), time.monotonic())))


def _serve_models(app: FastAPI, fleet: Fleet) -> None:
    """Adds the endpoints that list models."""

    @got(app, "/v1/models")
    async def models(_: Request) -> Response:
        return _json(replies.models((called, model[:5]) for called, model in fleet.served().items()))

    @got(app, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(orjson.dumps(replies.model(name, fleet.model(name)[:5])))


def _serve_texts(app: FastAPI, work: Work) -> None:
    """Adds the endpoints for tokens, with vLLM's paths and fields."""

    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        asked = await work.read(request, TokenizeBody, texts.of_tokenize)
        return _json(orjson.dumps(await texts.tokenized(work.fleet, asked, request.state.split_special_tokens)))

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        asked = await work.read(request, DetokenizeBody, lambda body: body)
        return _json(orjson.dumps(await texts.detokenized(work.fleet, asked)))


def _serve_overview(app: FastAPI, version: str) -> None:
    """Adds the endpoints that list the paths and the version."""

    @got(app, "/")
    async def root(_: Request) -> Response:
        served = {route.path for route in app.routes if isinstance(route, APIRoute)}
        paths = sorted(served - {"/", *POOLING_PATHS})
        return _json(orjson.dumps({"name": "quire-gateway", "version": version, "paths": paths}))

    @got(app, "/version")
    async def version_of(_: Request) -> Response:
        return _json(orjson.dumps({"version": version}))


def _put_errors_in_form(app: FastAPI) -> None:
    """Gives every error OpenAI's form."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        entry: Entry | None = getattr(request.state, "entry", None)
        if entry is not None:
            entry.error = error.code
        return _failed(error)

    # Without this handler FastAPI would send an error of its own form. The gate logs the exception in any case.
    @app.exception_handler(Exception)
    async def unknown(_request: Request, _error: Exception) -> Response:
        return _failed(defect())

    @app.exception_handler(RequestValidationError)
    async def of_query(_request: Request, error: RequestValidationError) -> Response:
        return _failed(of_validation([{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        called = f"{request.method} {request.url.path[:PATH_SHOWN]}"
        allowed = _methods_of(request)
        # HAProxy's checks ask with OPTIONS by default. `OPTIONS *` asks for the whole server.
        if request.method == "OPTIONS" and (allowed or request.url.path == "/*"):
            return Response(status_code=204, headers=_allow(allowed or ("DELETE", "GET", "HEAD", "POST")))
        what = {404: f"Unknown request URL: {called}", 405: f"{called} is not allowed: use {', '.join(allowed)}"}
        failure = ApiError(error.status_code, what.get(error.status_code, str(error.detail)))
        if allowed:
            failure.headers |= _allow(allowed)
        return _failed(failure)


def _methods_of(request: Request) -> list[str]:
    """Returns the methods that the path of a request takes, apart from OPTIONS; empty if there is no such path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


def _allow(methods: Iterable[str]) -> dict[str, str]:
    return {"Allow": ", ".join([*methods, "OPTIONS"])}


def _failed(error: ApiError) -> Response:
    return Response(
        orjson.dumps(error.body), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
