"""The endpoints of the cache. A caller reaches its own namespace only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from quire_gateway import relay
from quire_gateway.asks import Ask
from quire_gateway.caching.bodies import DropBody, MatchBody, WarmBody, ask_of, of_drop, of_warm
from quire_gateway.caching.pools import dropped, matched, whole_blocks
from quire_gateway.description import described
from quire_gateway.prepared_call import Call
from quire_gateway.replies import Answer, CompletionForm, Taken
from quire_gateway.serving import Served
from quire_gateway.work import Computed, Work


class WarmForm(CompletionForm):
    """The shape of answers of /v1/cache/warm."""

    def whole(self, answers: Sequence[Answer], taken: Taken) -> bytes:
        """Returns the usage alone."""
        return orjson.dumps({"object": "cache.warm", "model": self._head["model"], "usage": taken.as_json()})


def serve_cache(app: FastAPI, work: Work) -> None:
    """Adds the endpoints of the cache to an application."""

    async def prepared(request: Request, ask: Ask) -> Call:
        state = request.state
        return await relay.prepare(
            work.fleet,
            ask,
            entry=state.entry,
            namespace=state.namespace,
            split_special_tokens=state.split_special_tokens,
            request_id=state.request_id,
            timeout_s=work.request_timeout_s,
        )

    async def looked_up(request: Request, ask: Ask, kept: int | None = None) -> dict[str, Any]:
        call = await prepared(request, ask)
        found = await matched(work.fleet, call)
        answer = {
            "object": "cache.match",
            "model": call.model.name,
            "prompt_tokens": len(call.tokens[0]),
            "cached_tokens": max(found.values(), default=0),
            "cached_tokens_of_workers": sorted(found.values(), reverse=True),
        }
        if kept is None:
            return answer
        lost = [max(count - whole_blocks(backend, kept), 0) for backend, count in found.items()]
        return {**answer, "object": "cache.drop", "dry_run": True, "dropped_tokens": max(lost, default=0)}

    @app.post("/v1/cache/match", openapi_extra=described(MatchBody))
    async def match(request: Request) -> Response:
        ask = await work.read(request, MatchBody, ask_of)
        return Computed(work.telemetry, lambda: looked_up(request, ask))

    @app.post("/v1/cache/warm", openapi_extra=described(WarmBody))
    async def warm(request: Request) -> Response:
        ask, state = await work.read(request, WarmBody, of_warm), request.state
        call = await prepared(request, ask)
        form = WarmForm(state.request_id, int(time.time()), call.model.name, with_usage=True)
        return Served(work.fleet, call, form, work.telemetry, state.started_s, memory=state.memory)

    @app.post("/v1/cache/drop", openapi_extra=described(DropBody))
    async def drop(request: Request) -> Response:
        body, ask = await work.read(request, DropBody, of_drop)

        async def compute() -> dict[str, Any]:
            if ask is not None and body.dry_run:
                return await looked_up(request, ask, body.keep_tokens)
            call = None if ask is None else await prepared(request, ask)
            done = await dropped(
                work.fleet, request.state.namespace, body.model, call, body.keep_tokens, is_dry=body.dry_run
            )
            return {
                "object": "cache.drop",
                "dry_run": body.dry_run,
                "dropped_blocks": None if done is None else done.dropped_block_count,
                "held_blocks": None if done is None else done.held_block_count,
            }

        return Computed(work.telemetry, compute)
