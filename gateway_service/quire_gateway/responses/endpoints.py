"""The endpoints of responses."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Final

import orjson
import structlog
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from quire_gateway import relay
from quire_gateway.continuing import Said
from quire_gateway.description import described
from quire_gateway.failures import SERVER, ApiError, invalid, unsupported
from quire_gateway.metrics import MORE, TAIL
from quire_gateway.plain_route import got
from quire_gateway.prepared_call import Call
from quire_gateway.responses.background import Background
from quire_gateway.responses.bodies import InputTokensBody, ResponseBody
from quire_gateway.responses.form import Ended, ResponseForm, failed
from quire_gateway.responses.requests import Asked, of_response, renamed
from quire_gateway.responses.store import Store, StoredResponse
from quire_gateway.serving import Served
from quire_gateway.work import Work, json_response

log = structlog.get_logger()
LIMIT_DEFAULT, LIMIT_MAX = 20, 100  # items on a page, as in OpenAI's API
_DEFECT: Final = "the gateway failed because of a bug; its log has a line about it"


def serve_responses(app: FastAPI, work: Work, store: Store) -> None:
    """Adds the endpoints of responses to an application."""
    responses = _Responses(work, store)

    @app.post("/v1/responses", openapi_extra=described(ResponseBody))
    async def create(request: Request) -> Response:
        return await responses.create(request)

    @app.post("/v1/responses/input_tokens", openapi_extra=described(InputTokensBody))
    async def input_tokens(request: Request) -> Response:
        return await responses.count(request)

    @got(app, "/v1/responses/{identity}")
    async def get(request: Request, identity: str, *, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", "is only for creating a response: a stored response is returned as a whole")
        return Response(responses.find(request, identity).response, media_type="application/json")

    @app.delete("/v1/responses/{identity}")
    async def delete(request: Request, identity: str) -> Response:
        return await responses.delete(request, identity)

    @app.post("/v1/responses/{identity}/cancel")
    async def cancel(request: Request, identity: str) -> Response:
        return await responses.cancel(request, identity)

    @got(app, "/v1/responses/{identity}/input_items")
    async def input_items(
        request: Request, identity: str, limit: str = "", order: str = "desc", after: str = Query("", max_length=128)
    ) -> Response:
        return _page(responses.find(request, identity).items, limit, order, after)


class _Responses:
    """Answers calls on responses. Each response belongs to the namespace of its caller."""

    def __init__(self, work: Work, store: Store) -> None:
        self._work, self._store = work, store
        self._background = Background(are_several=store.are_several)

    def find(self, request: Request, identity: str, param: str | None = None) -> StoredResponse:
        """Returns a response of the caller's namespace.

        Raises:
            ApiError: the namespace has no response with this id.
        """
        kept = self._store.find(request.state.namespace, identity)
        if kept is None:
            raise _not_found(identity, param)
        return kept

    async def _prepared(self, request: Request, kind: type[InputTokensBody]) -> tuple[Asked, Call, Said | None]:
        """Returns the parsed request, the call with its tokens, and the conversation that it continues.

        Raises:
            ApiError: the request is refused.
        """
        state, work = request.state, self._work
        earlier: StoredResponse | None = None

        def ask_of(body: InputTokensBody) -> Asked:
            nonlocal earlier
            if body.previous_response_id is not None:
                earlier = self.find(request, body.previous_response_id, "previous_response_id")
                if orjson.loads(earlier.response)["status"] not in ("completed", "incomplete"):
                    what = "previous_response_id must name a response with status completed or incomplete"
                    raise invalid("previous_response_id", what)
            if not isinstance(body, ResponseBody):
                body = ResponseBody.model_validate(dict(body))
            find = partial(self._store.find_item, state.namespace)
            return of_response(body, () if earlier is None else earlier.conversation(), find)

        asked = await work.read(request, kind, ask_of)
        said = None if earlier is None else earlier.said
        try:
            call = await relay.prepare(
                work.fleet,
                asked.ask,
                entry=state.entry,
                namespace=state.namespace,
                split_special_tokens=state.split_special_tokens,
                request_id=state.request_id,
                timeout_s=work.request_timeout_s,
                said=said,
            )
        except ApiError as error:
            raise renamed(error) from None
        return asked, call, said

    async def count(self, request: Request) -> Response:
        """Returns how many tokens the prompt of a response would have.

        Raises:
            ApiError: a response with this body would be refused.
        """
        _, call, _ = await self._prepared(request, InputTokensBody)
        return json_response({"object": "response.input_tokens", "input_tokens": len(call.tokens[0])})

    async def create(self, request: Request) -> Response:
        """Answers a POST of a response: as a whole, as a stream, or in the background.

        Raises:
            ApiError: the request is refused.
        """
        state, work = request.state, self._work
        asked, call, said = await self._prepared(request, ResponseBody)
        head = asked.head
        head |= {"id": f"resp_{secrets.token_hex(24)}", "created_at": int(time.time()), "model": call.model.name}

        def on_end(ended: Ended) -> None:
            if said is not None:
                self._count_continued(call, len(said.tokens), ended)
            if asked.is_stored:
                this = Said(call.model.base, ended.tokens, ended.prompt_token_count, call.as_split[0])
                ended.response["store"] = self._store.put(state.namespace, ended.response, asked.items, this)

        served = Served(
            work.fleet,
            call,
            ResponseForm(head, on_end),
            work.telemetry,
            state.started_s,
            memory=state.memory.another() if asked.is_background else state.memory,
            keep_alive_s=work.keep_alive_s,
        )
        if not asked.is_background:
            return served
        if not self._store.put(state.namespace, head, asked.items):
            raise ApiError(
                429, "there is no room to store the response: delete some stored responses", code="response_too_large"
            )
        self._background.start(state.namespace, head["id"], self._unattended(served, state.namespace, asked))
        return json_response(head)

    async def _unattended(self, served: Served, namespace: str, asked: Asked) -> None:
        try:
            await served.unattended()
        except ApiError as error:
            self._store.put(namespace, failed(asked.head, error), asked.items)
        except Exception as error:  # The text of the error may contain data of the caller.
            log.error("response failed", response_id=asked.head["id"], error=type(error).__name__)
            self._store.put(
                namespace, failed(asked.head, ApiError(500, _DEFECT, kind=SERVER, code="internal_error")), asked.items
            )

    def _count_continued(self, call: Call, said_count: int, ended: Ended) -> None:
        """Counts a response that continues another one of `said_count` tokens."""
        computed = ended.taken.prompt_token_count - ended.taken.cached_token_count
        own = ended.prompt_token_count - said_count
        block = self._work.fleet.block_size(call.model)
        self._work.telemetry.continued[TAIL if computed <= own + block else MORE] += 1

    async def delete(self, request: Request, identity: str) -> Response:
        """Deletes a response, and cancels it if it is running.

        Raises:
            ApiError: the response does not exist.
        """
        self.find(request, identity)
        await self._background.cancel(request.state.namespace, identity)
        self._store.remove(request.state.namespace, identity)
        return json_response({"id": identity, "object": "response", "deleted": True})

    async def cancel(self, request: Request, identity: str) -> Response:
        """Cancels a response that is computed in the background. A response that has ended stays as it is.

        Raises:
            ApiError: the response does not exist, or was not computed in the background.
        """
        kept = self.find(request, identity)
        if not orjson.loads(kept.response)["background"]:
            raise ApiError(
                400, "only a response with background=true can be canceled; to end another one, close its connection"
            )
        if await self._background.cancel(request.state.namespace, identity):
            response = {**orjson.loads(kept.response), "status": "cancelled"}
            self._store.put(request.state.namespace, response, kept.items)
        return Response(self.find(request, identity).response, media_type="application/json")


def _not_found(identity: str, param: str | None) -> ApiError:
    if param is None:
        message = f"Response with id {identity[:128]!r} not found."
        return ApiError(404, message, code="response_not_found")
    return ApiError(
        404,
        f"Previous response with id {identity[:128]!r} not found.",
        param=param,
        code="previous_response_not_found",
    )


def _page(items: tuple[bytes, ...], limit: str, order: str, after: str) -> Response:
    """Returns a page of a response's items.

    Raises:
        ApiError: a parameter of the page is invalid.
    """
    count = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 4 else 0
    if limit and not 1 <= count <= LIMIT_MAX:
        raise invalid("limit", f"limit must be from 1 to {LIMIT_MAX}, not {limit[:32]!r}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order must be 'asc' or 'desc', not {order[:32]!r}")
    found = items[::-1] if order == "desc" else items
    if after:
        place = next((index for index, item in enumerate(found) if _id_of(item) == after), None)
        if place is None:
            raise invalid("after", f"after must be the id of an item in this list, not {after!r}")
        found = found[place + 1 :]
    page = found[: count or LIMIT_DEFAULT]
    return json_response(
        {
            "object": "list",
            "data": [orjson.Fragment(item) for item in page],
            "first_id": _id_of(page[0]) if page else None,
            "last_id": _id_of(page[-1]) if page else None,
            "has_more": len(page) < len(found),
        }
    )


def _id_of(item: bytes) -> str:
    identity: str = orjson.loads(item)["id"]
    return identity
