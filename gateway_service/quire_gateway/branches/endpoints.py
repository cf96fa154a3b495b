"""The endpoints of branches. Tokens that a call adds become part of the branch when the call ends without an error."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from quire.errors import QuireError
from quire.sampling import CachePolicy
from starlette.types import Receive, Scope, Send

from quire_gateway import relay, unary_calls
from quire_gateway.answer_sizes import bounded
from quire_gateway.answering import busy
from quire_gateway.asks import Ask, of_continuation, with_defaults
from quire_gateway.branches.bodies import ExtendBody, ForkBody, GenerateBody, PrefillBody, ScoreBody
from quire_gateway.branches.held import Branch, Branches
from quire_gateway.conversations import Chat, prompt_of
from quire_gateway.description import described
from quire_gateway.failures import PROMPT, invalid, of_quire, unsupported
from quire_gateway.plain_route import got
from quire_gateway.prepared_call import Call
from quire_gateway.replies import CompletionForm
from quire_gateway.serving import Served
from quire_gateway.work import Computed, Work, json_response

BODIES: Final = (PrefillBody, ForkBody, ExtendBody, ScoreBody, GenerateBody)
_CHAT_NAMES: Final = {
    "messages_json": "messages",
    "tools_json": "tools",
    "variables": "chat_template_kwargs",
    "variables_json": "chat_template_kwargs",
    "ttl_ms": "ttl_s",
}


def serve_branches(app: FastAPI, work: Work) -> None:
    """Adds the endpoints of branches to an application."""
    branches = Branches()
    calls = _Calls(work, branches)

    @app.post("/v1/branches", openapi_extra=described(PrefillBody))
    async def prefill(request: Request) -> Response:
        return await calls.prefill(request)

    @got(app, "/v1/branches")
    async def listed(request: Request) -> Response:
        found = branches.all_of(request.state.namespace)
        return json_response({"object": "list", "data": [branch.as_json() for branch in found]})

    @got(app, "/v1/branches/{identity}")
    async def get(request: Request, identity: str) -> Response:
        with branches.using(request.state.namespace, identity) as branch:
            return json_response(branch.as_json())

    @app.delete("/v1/branches/{identity}")
    async def release(request: Request, identity: str) -> Response:
        with branches.using(request.state.namespace, identity) as branch:
            await branches.release(branch)
        return json_response({"id": identity, "object": "branch", "deleted": True})

    @app.post("/v1/branches/{identity}/fork", openapi_extra=described(ForkBody))
    async def fork(request: Request, identity: str) -> Response:
        return await calls.fork(request, identity)

    @app.post("/v1/branches/{identity}/extend", openapi_extra=described(ExtendBody))
    async def extend(request: Request, identity: str) -> Response:
        return await calls.extend(request, identity)

    @app.post("/v1/branches/{identity}/score", openapi_extra=described(ScoreBody))
    async def score(request: Request, identity: str) -> Response:
        return await calls.score(request, identity)

    @app.post("/v1/branches/{identity}/generate", openapi_extra=described(GenerateBody))
    async def generate(request: Request, identity: str) -> Response:
        return await calls.generate(request, identity)


class _Calls:
    """Answers calls on branches."""

    def __init__(self, work: Work, branches: Branches) -> None:
        self._work, self._branches = work, branches

    async def prefill(self, request: Request) -> Response:
        """Computes a prompt, and keeps it as a branch."""
        work, namespace = self._work, request.state.namespace
        body, prompt = await work.read(request, PrefillBody, lambda body: (body, prompt_of(body)))
        model = work.fleet.model(body.model)
        if model.adapter:
            raise unsupported("model", "is an adapter, but branches work only with the model itself")
        own = "messages" if isinstance(prompt, Chat) else "prompt"
        names = {**_CHAT_NAMES, PROMPT: own, "text": own, "tokens": own}

        async def compute() -> dict[str, Any]:
            split = request.state.split_special_tokens
            tokens = await unary_calls.tokens_of(work.fleet, model, prompt, names, split_special_tokens=split)
            about: dict[str, Any] = {"ttl_s": body.ttl_s, "timeout_s": work.request_timeout_s, "names": names}
            about["cache"] = CachePolicy(no_store=body.cache_no_store)
            held = await relay.prefilled(work.fleet, model, tokens, namespace, **about)
            return self._branches.add(held, model, namespace, body.ttl_s).as_json()

        return Computed(work.telemetry, compute)

    async def fork(self, request: Request, identity: str) -> Response:
        """Makes further branches with the same tokens."""
        body = await self._work.read(request, ForkBody, lambda body: body)

        async def compute(branch: Branch) -> dict[str, Any]:
            made = await branch.held.branch.fork(body.count, timeout_s=self._work.request_timeout_s)
            held = [branch.held._replace(branch=each) for each in made]
            forks = [self._branches.add(each, branch.model, branch.namespace, branch.ttl_s) for each in held]
            return {"object": "list", "data": [fork.as_json() for fork in forks]}

        return self._on(request, identity, {}, compute)

    async def extend(self, request: Request, identity: str) -> Response:
        """Appends text or tokens to a branch, and computes them."""
        body = await self._work.read(request, ExtendBody, lambda body: body)

        async def compute(branch: Branch) -> dict[str, Any]:
            await branch.held.branch.extend(body.continuation, timeout_s=self._work.request_timeout_s)
            return branch.as_json()

        return self._on(request, identity, dict.fromkeys((PROMPT, "text", "tokens"), "continuation"), compute)

    async def score(self, request: Request, identity: str) -> Response:
        """Returns how likely candidates are after a branch. The branch does not change."""
        body = await self._work.read(request, ScoreBody, lambda body: body)

        async def compute(branch: Branch) -> dict[str, Any]:
            scores = await branch.held.branch.score(body.candidates, timeout_s=self._work.request_timeout_s)
            told = [
                {
                    "token_ids": score.token_ids,
                    "logprobs": score.logprobs,
                    "logprob": score.logprob,
                    "mean_logprob": score.mean_logprob,
                }
                for score in scores
            ]
            return {"object": "list", "data": told}

        return self._on(request, identity, dict.fromkeys((PROMPT, "text", "tokens"), "candidates"), compute)

    async def generate(self, request: Request, identity: str) -> Response:
        """Generates text after a branch. The branch keeps the text."""
        ask = await self._work.read(
            request, GenerateBody, lambda body: of_continuation(body, body.max_tokens, body.logprobs)
        )
        return _Generated(self._work, self._branches, request, identity, ask)

    def _on(
        self,
        request: Request,
        identity: str,
        names: dict[str, str],
        compute: Callable[[Branch], Awaitable[dict[str, Any]]],
    ) -> Response:
        """Returns the answer of a call on a branch."""

        async def answer() -> dict[str, Any]:
            with self._branches.using(request.state.namespace, identity) as branch, busy(branch.held.backend):
                try:
                    return await compute(branch)
                except QuireError as error:
                    raise of_quire(error, names) from None

        return Computed(self._work.telemetry, answer)


class _Generated(Response):
    """The text that a model generates after a branch, as a whole or as a stream."""

    def __init__(self, work: Work, branches: Branches, request: Request, identity: str, ask: Ask) -> None:
        super().__init__()
        self._work, self._branches, self._state = work, branches, request.state
        self._identity, self._ask = identity, ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generates the text, and sends it.

        Raises:
            ApiError: the call failed before anything was sent.
        """
        work, state, ask = self._work, self._state, self._ask
        with self._branches.using(state.namespace, self._identity) as branch:
            model = branch.model
            if ask.model not in (None, model.name) and not work.fleet.is_called(model, ask.model):
                raise invalid("model", f"model is {str(ask.model)[:128]!r}, but the branch belongs to {model.name!r}")
            state.entry.model = model.name
            call = Call(
                bounded(with_defaults(ask, work.fleet.sampling_defaults(model)), ((),)),
                model,
                ((),),
                state.namespace,
                state.request_id,
                work.request_timeout_s,
                state.entry,
                held=branch.held,
            )
            form = CompletionForm(
                state.request_id,
                int(time.time()),
                model.name,
                with_usage=ask.with_usage,
                fingerprint=model.fingerprint,
                service_tier=ask.service_tier,
            )
            served = Served(
                work.fleet,
                call,
                form,
                work.telemetry,
                state.started_s,
                memory=state.memory,
                keep_alive_s=work.keep_alive_s,
            )
            await served(scope, receive, send)
