"""Sends answers, as a whole or piece by piece, until they end or their caller has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog
from quire.sampling import Chunk, FinishReason, TokenLogprobs
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire_gateway import relay
from quire_gateway.calls.deltas import Delta, joined
from quire_gateway.calls.plans import reasoning_token_count
from quire_gateway.choices import Choice, begin_choices
from quire_gateway.failures import ApiError
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Telemetry
from quire_gateway.prepared_call import Call
from quire_gateway.probabilities import Columns, joined_logprobs, of_prompt, text_of
from quire_gateway.replies import Answer, Beside, Form, Taken, reason_of
from quire_gateway.shares import Charge
from quire_gateway.spelling import Speller
from quire_gateway.stream_head import KEEP_ALIVE_S, StreamHead

log = structlog.get_logger()


class CallerGoneError(Exception):
    """The caller has closed the connection, so the answer is dropped."""


class Served(Response):
    """One answer. If it is not finished, unfinished work at the workers is cancelled.

    Args:
        fleet: the workers.
        call: the request.
        form: the form of the answer.
        telemetry: the counters to update.
        started_s: when the request came, in seconds of `time.monotonic`.
        memory: the memory that the request takes.
        keep_alive_s: seconds of silence after which a stream gets a comment; 0 for never.
    """

    def __init__(
        self,
        fleet: Fleet,
        call: Call,
        form: Form,
        telemetry: Telemetry,
        started_s: float,
        *,
        memory: Charge,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        super().__init__()
        self._keep_alive_s = keep_alive_s
        self._memory = memory
        self._fleet, self._call, self._form = fleet, call, form
        self._telemetry, self._started_s = telemetry, started_s
        self._taken = Taken()
        self._waits_for_first = True
        self._of_prompts: dict[int, tuple[TokenLogprobs, ...]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        answer = self._stream(send) if self._call.ask.is_streamed else self._whole(send)
        try:
            await until_gone(receive, answer)
        except CallerGoneError:
            self._telemetry.left_count += 1
            self._call.entry.error = "caller_left"
            # The prompts count in full, because the worker has computed some of their tokens.
            self._call.entry.prompt_tokens = sum(map(len, self._call.tokens))
            log.debug("caller left", request_id=self._call.request_id)

    async def unattended(self) -> None:
        """Computes the answer while no caller waits for it. Only its form gets the answer.

        Raises:
            ApiError: the request failed.
        """
        try:
            await self._whole(_nowhere)
        finally:
            self._memory.end()

    async def _whole(self, send: Send) -> None:
        """Sends all choices in one answer."""
        choices = begin_choices(self._fleet, self._call)
        try:
            await self._send_whole(send, choices)
        finally:
            # An error refers to this frame, and the frame would keep the choices alive until garbage is collected.
            choices.clear()

    async def _send_whole(self, send: Send, choices: list[Choice]) -> None:
        edits = self._call.ask.edits_chunks
        async with aclosing(relay.pieces(self._fleet, self._call, self._memory)) as pieces:
            async for number, came in pieces:
                choice = choices[self._index(number, came)]
                chunk = await self._edited(number, came, choice) if edits else came
                choice.texts.append(chunk.text)
                if choice.reader is not None:
                    choice.deltas.append(choice.read(chunk))
                choice.token_ids.extend(chunk.token_ids)
                self._tell(number, chunk, choice)
                choice.is_opened = True
                choice.finish_reason = chunk.finish_reason or choice.finish_reason
                choice.stop_reason = chunk.stop_reason
                self._note(chunk)
        self._check_whole(choices)
        answers = []
        of_prompts = [await self._prompt_logprobs(number) for number in range(len(self._call.tokens))]
        for index, choice in enumerate(choices):
            number = index // self._call.ask.choice_count
            logprobs = await self._logprobs(choice, "".join(choice.texts))
            beside = self._beside(number, choice.token_ids.tolist(), logprobs)
            answers.append(self._answer(choice, beside, of_prompts[number]))
        await self._count_reasoning(choices)
        body = self._form.whole(answers, self._taken)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Sends each piece as it comes. After the first piece, an error is sent as the last event of the stream."""
        form, edits = self._form, self._call.ask.edits_chunks
        top_count, plan = self._call.ask.top_logprob_count, self._call.plan
        counts_reasoning = plan is not None and plan.has_reasoning and self._call.ask.with_usage
        choices = begin_choices(self._fleet, self._call)
        head = StreamHead(send, self._keep_alive_s)
        try:
            async with head, aclosing(relay.pieces(self._fleet, self._call, self._memory)) as pieces:
                async for number, came in pieces:
                    index = self._index(number, came)
                    choice = choices[index]
                    chunk = await self._edited(number, came, choice) if edits else came
                    self._tell(number, chunk, choice)
                    data = b"" if choice.is_opened else form.opening(index, self._beside(number, (), None, 0))
                    choice.is_opened = True
                    choice.token_count += len(chunk.token_ids)
                    if counts_reasoning:
                        choice.token_ids.extend(chunk.token_ids)
                    choice.finish_reason = chunk.finish_reason or choice.finish_reason
                    ids = chunk.token_ids if self._call.ask.with_token_ids else ()
                    delta = self._told_of(choice.read(chunk))
                    if delta or chunk.finish_reason is not None or ids or len(choice.told):
                        logprobs = None if top_count is None else await self._logprobs(choice, chunk.text)
                        beside = self._beside(number, ids, logprobs, choice.token_count)
                        beside = beside._replace(prompt_token_ids=None) if choice.has_piece else beside
                        if chunk.stop_reason is not None:
                            beside = beside._replace(stop_reason=chunk.stop_reason)
                        choice.has_piece = True
                        data += form.piece(index, delta, self._reason(choice, chunk), beside)
                    self._note(chunk)
                    await head.piece_came(data)
            self._check_whole(choices)
            if self._call.ask.with_usage:
                await self._count_reasoning(choices)
            last = form.ending(self._taken)
        except ApiError as error:
            if not head.is_sent:
                raise
            self._call.entry.error = error.code
            last = form.failed(error)
        await send({"type": "http.response.body", "body": last})

    async def _count_reasoning(self, choices: Iterable[Choice]) -> None:
        """Stores how many tokens of the answer are reasoning.

        Raises:
            ApiError: no worker answers with the bytes of the tokens.
        """
        plan = self._call.plan
        if plan is None or not plan.has_reasoning:
            return
        count = 0
        for index, choice in enumerate(choices):
            if choice.reader is None or not choice.reader.has_reasoned:
                continue
            prompt = self._call.tokens[index // self._call.ask.choice_count]
            speller = Speller(self._fleet, self._call.model, prompt, keeps_special=True)
            count += reasoning_token_count(plan, await speller.texts(choice.token_ids))
        self._taken = self._taken._replace(reasoning_token_count=count)

    def _answer(self, choice: Choice, beside: Beside, prompt_logprobs: Sequence[Any] | None) -> Answer:
        """Returns a choice that is complete."""
        plan = self._call.plan
        if plan is None:
            text = "".join(choice.texts)
            reason = reason_of(choice.finish_reason)
            return Answer(text, reason, beside, prompt_logprobs, stop_reason=choice.stop_reason)
        content, reasoning, calls = joined([self._told_of(delta) for delta in choice.deltas])
        reason = reason_of(choice.finish_reason, has_called=plan.tells_calls and bool(calls))
        told = reasoning if plan.tells_reasoning and plan.has_reasoning else None
        return Answer(content, reason, beside, prompt_logprobs, told, calls, choice.stop_reason)

    def _told_of(self, delta: Delta) -> Delta:
        """Returns the part of a piece that the caller gets: without reasoning if the caller does not want it."""
        plan = self._call.plan
        return delta if plan is None or plan.tells_reasoning else delta._replace(reasoning="")

    def _reason(self, choice: Choice, chunk: Chunk) -> str | None:
        plan, reader = self._call.plan, choice.reader
        has_called = plan is not None and plan.tells_calls and reader is not None and reader.call_count > 0
        return reason_of(chunk.finish_reason, has_called=has_called)

    def _beside(
        self, number: int, token_ids: Sequence[int], logprobs: Mapping[str, Any] | None, output_count: int | None = None
    ) -> Beside:
        """Returns the optional data of a text, or of a piece of it.

        Args:
            number: the number of the text's prompt.
            token_ids: the tokens of the text or piece.
            logprobs: the logprobs of these tokens.
            output_count: tokens of the choice so far; None if the answer is sent as a whole.
        """
        ask, prompt = self._call.ask, self._call.tokens[number]
        taken = None
        if ask.with_usage_so_far and output_count is not None:
            taken = Taken(len(prompt), output_token_count=output_count)
        if not ask.with_token_ids:
            return Beside(logprobs, taken=taken)
        return Beside(logprobs, token_ids, prompt if self._call.held is None else None, taken)

    def _index(self, number: int, chunk: Chunk) -> int:
        """Returns the number of a chunk's choice. Choices are ordered by prompt, then by sample."""
        return number * self._call.ask.choice_count + chunk.sample

    async def _edited(self, number: int, chunk: Chunk, choice: Choice) -> Chunk:
        """Returns a chunk with the echo before the first text of its choice, and without an answer if none is wanted.

        Raises:
            ApiError: no worker answers with the bytes of the tokens.
        """
        text, ask, tokens = "", self._call.ask, self._call.tokens[number]
        prompt = ask.prompts[number]
        if ask.options.get("echo") and not choice.is_opened:
            speller = Speller(self._fleet, self._call.model, keeps_special=True)
            text = prompt if isinstance(prompt, str) else text_of(await speller.texts(tokens))
        if not ask.is_prompt_alone:
            return replace(chunk, text=text + chunk.text)
        usage = chunk.usage and replace(chunk.usage, output_token_count=0)
        reason = chunk.finish_reason and FinishReason.LENGTH
        without: dict[str, Any] = {"token_ids": (), "logprobs": (), "stop_reason": None}
        return replace(chunk, text=text, finish_reason=reason, usage=usage, **without)

    def _tell(self, number: int, chunk: Chunk, choice: Choice) -> None:
        """Stores the logprobs of a chunk's tokens, if they are wanted.

        With an echo, the first chunk of a choice also gets the logprobs of the prompt. The worker sends these with the
        first chunk of any sample.
        """
        ask = self._call.ask
        if chunk.prompt_logprobs:
            self._of_prompts[number] = chunk.prompt_logprobs
        count = ask.top_logprob_count
        if count is None:
            return
        if ask.options.get("echo") and not choice.is_opened:
            choice.told.add_columns(self._told_of_prompt(number, count))
        choice.told.add(chunk.logprobs, count)

    def _told_of_prompt(self, number: int, count: int) -> Columns:
        told = Columns()
        told.add_first(self._call.tokens[number][0])
        told.add(self._of_prompts.get(number, ()), count)
        return told

    async def _prompt_logprobs(self, number: int) -> Sequence[Any] | None:
        """Returns the logprobs of a prompt's tokens, in vLLM's form.

        Raises:
            ApiError: no worker answers with the bytes of the tokens.
        """
        count = self._call.ask.prompt_logprob_count
        if count is None:
            return None
        told = self._told_of_prompt(number, count)
        slices = Speller(self._fleet, self._call.model).slices(told)
        return [each async for part, spelled in slices for each in of_prompt(part, spelled)]

    async def _logprobs(self, choice: Choice, text: str) -> Mapping[str, Any] | None:
        """Returns the logprobs of a choice's tokens that were not sent yet, in the form that goes with this text.

        Raises:
            ApiError: no worker answers with the bytes of the tokens.
        """
        if self._call.ask.top_logprob_count is None:
            return None
        told, choice.told = choice.told, Columns()
        ask = self._call.ask  # A worker holds back text that may begin a stop text, but not the text's tokens.
        choice.places.add(text, is_held=ask.is_streamed and "stop" in ask.options and choice.finish_reason is None)
        parts = []
        async for part, spelled in choice.speller.slices(told):
            offsets = [choice.places.of(texts[token.token_id]) for token, texts in zip(part, spelled, strict=True)]
            parts.append(self._form.logprobs(part, spelled, offsets))
        return joined_logprobs(parts)

    def _note(self, chunk: Chunk) -> None:
        if self._waits_for_first:
            self._waits_for_first = False
            first_token_s = time.monotonic() - self._started_s
            self._telemetry.first_token.observe(first_token_s)
            self._call.entry.first_token_s = first_token_s
            self._call.entry.prompt_tokens = sum(map(len, self._call.tokens))
        entry = self._call.entry
        entry.output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            entry.finish.append(chunk.finish_reason.name.lower())
        if chunk.usage is not None:
            self._taken = self._taken.plus(chunk.usage)
            self._telemetry.taken = self._telemetry.taken.plus(chunk.usage)
            entry.cached_tokens = self._taken.cached_token_count

    @staticmethod
    def _check_whole(choices: Iterable[Choice]) -> None:
        """Refuses an answer that a worker has broken off.

        Raises:
            ApiError: a choice has not ended.
        """
        if any(choice.finish_reason is None for choice in choices):
            raise ApiError(502, "a worker ended its answer too early", kind="server_error", code="incomplete")


async def _nowhere(_message: Message) -> None:
    """Drops a message, because no caller waits for it."""


async def until_gone(receive: Receive, answer: Awaitable[None]) -> None:
    """Runs an answer while its caller is connected, and cancels it when the caller has gone.

    Raises:
        CallerGoneError: the caller has gone.
    """
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise CallerGoneError
        await answering
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
        del answering, leaving, task  # Breaks a reference cycle: the tasks' errors refer to this frame.


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
