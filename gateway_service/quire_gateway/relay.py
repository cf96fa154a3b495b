"""Sends a request to workers: tokenizes its prompts, and yields the pieces of the answers to all prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple, cast

import structlog
from quire.errors import QuireError
from quire.sampling import CachePolicy, Chunk, SamplingOptions

from quire_gateway.answer_sizes import VALUE_BYTES, bounded, bytes_of, told_bytes_of
from quire_gateway.answering import answers_of, answers_of_branch, busy
from quire_gateway.asks import Ask, with_defaults
from quire_gateway.backend import Backend, Model
from quire_gateway.calls.plans import TAIL_TOKENS, ends_behind_reasoning, ends_in_reasoning, plan_of
from quire_gateway.continuing import Said, continued
from quire_gateway.conversations import Chat
from quire_gateway.entries import Entry
from quire_gateway.failures import ApiError, full_of_answers, of_quire, unavailable
from quire_gateway.fleet import Fleet
from quire_gateway.prepared_call import Call, Held
from quire_gateway.shares import Charge
from quire_gateway.spelling import Speller
from quire_gateway.unary_calls import ELSEWHERE, tokens_of

log = structlog.get_logger()

LARGE_BYTES: Final = 1_000 * VALUE_BYTES  # bytes of a chunk that takes the event loop some milliseconds to read
QUEUED_MAX: Final = 64  # pieces that may wait to be sent, if a request has several prompts


class StreamPiece(NamedTuple):
    """A chunk of the answers to one prompt."""

    prompt: int
    chunk: Chunk


async def prepare(
    fleet: Fleet,
    ask: Ask,
    *,
    entry: Entry,
    namespace: str,
    request_id: str,
    timeout_s: float,
    split_special_tokens: bool | None = None,
    said: Said | None = None,
) -> Call:
    """Finds the model, and tokenizes the prompts. A prompt that continues `said` begins with the tokens of `said`.

    Raises:
        ApiError: no worker serves the model, or a prompt cannot be tokenized or is too long.
    """
    model = fleet.model(ask.model)
    entry.model = model.name
    ask = with_defaults(ask, fleet.sampling_defaults(model))
    special = {"add_special_tokens": ask.add_special_tokens, "split_special_tokens": split_special_tokens}
    tokens = tuple([await tokens_of(fleet, model, prompt, ask.names, **special) for prompt in ask.prompts])
    wanted = 1 if ask.is_cut_to_fit else ask.max_tokens or 1
    if ask.prompt_tokens_max is not None:
        kept = max(ask.prompt_tokens_max or model.sequence_tokens_max - wanted, 1)
        if any(len(prompt) > kept for prompt in tokens):
            tokens = tuple(prompt[-kept:] for prompt in tokens)
            ask = ask._replace(prompts=tokens)  # An echo shows only the tokens that are left.
    as_split = tokens
    if said is not None and said.model == model.base and (parting := said.parting(tokens[0])) is not None:
        theirs = await _behind(fleet, model, said.tokens, parting.said)
        ours = await _behind(fleet, model, tokens[0], parting.prompt)
        tokens = (continued(said.tokens, tokens[0], parting, theirs, ours),)
    longest = max(map(len, tokens))
    if longest + wanted > model.sequence_tokens_max:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.sequence_tokens_max} tokens. However, you requested"
            f" {longest + wanted} tokens ({longest} in the {ask.prompt_param}, {wanted} in the completion).",
            param=ask.prompt_param if longest >= model.sequence_tokens_max else ask.names["max_tokens"],
            code="context_length_exceeded",
        )
    call = Call(bounded(ask, tokens), model, tokens, namespace, request_id, timeout_s, entry, as_split)
    if ask.wish.keep_ms or ask.wish.is_hidden:
        call = call._replace(cache=await _policy(fleet, call, special))
    return call if ask.tells_reasoning is None or ask.is_prompt_alone else await _planned(fleet, call)


async def _policy(fleet: Fleet, call: Call, special: Mapping[str, bool | None]) -> CachePolicy:
    """Returns the cache options for the worker. A breakpoint is where the messages up to a mark end in the prompt.

    If the template cannot render these messages alone, the last mark means the whole prompt; others do nothing.
    """
    ask, prompt, tokens = call.ask, call.ask.prompts[0], call.tokens[0]
    keep_s, counts, is_hidden = ask.wish.keep_ms / 1e3, ask.wish.message_counts, ask.wish.is_hidden
    if not counts or not isinstance(prompt, Chat):
        return CachePolicy(keep_s, no_store=is_hidden)
    ends = {len(tokens)} if counts[-1] >= len(prompt.messages) else set[int]()
    for count in [each for each in counts if each < len(prompt.messages)]:
        marked = prompt._replace(messages=prompt.messages[:count], with_generation_prompt=False, continues_final=False)
        try:
            alone = await tokens_of(fleet, call.model, marked, ask.names, **special)
            ends.add(next((n for n, (a, b) in enumerate(zip(alone, tokens, strict=False)) if a != b), len(alone)))
        except ApiError:
            ends |= {len(tokens)} if count == counts[-1] else set()
    return CachePolicy(keep_s, tuple(sorted(ends - {0}))) if ends - {0} else CachePolicy()


async def _behind(fleet: Fleet, model: Model, tokens: Sequence[int], place: int) -> list[bytes]:
    """Returns the bytes of a text's tokens from this place on."""
    return await Speller(fleet, model, tokens[:place], keeps_special=True).texts(tokens[place:]) if tokens else []


async def _planned(fleet: Fleet, call: Call) -> Call:
    """Returns the call of a chat, with the constraints on its answers and the plan to read them.

    Raises:
        ApiError: the answer may have calls and the model's format of calls is unknown, or no worker answers.
    """
    ask, model = call.ask, call.model
    notation = await fleet.notation(model)
    tail = call.tokens[0][-TAIL_TOKENS:] if notation.reasoning is not None else ()
    end = b"".join(await _behind(fleet, model, tail, 0)).decode(errors="replace")
    plan = plan_of(
        ask.tools,
        ask.options.get("json_schema"),
        notation,
        is_reasoning=ends_in_reasoning(end),
        has_reasoned=ends_behind_reasoning(end),
    )
    if plan is None:
        return call
    options: dict[str, Any] = {**ask.options, "skip_special_tokens": False}
    names = dict(ask.names)
    if plan.grammar is not None:
        names["grammar"] = "tools" if ask.tools is not None else names.get("json_schema", "response_format")
        options.pop("json_schema", None)
        options["grammar"] = plan.grammar
    ask = ask._replace(options=cast("SamplingOptions", options), names=names)
    return call._replace(ask=ask, plan=plan._replace(tells_reasoning=bool(ask.tells_reasoning)))


async def pieces(fleet: Fleet, call: Call, memory: Charge) -> AsyncGenerator[StreamPiece, None]:
    """Yields the pieces that workers answer, as they come. Closing the generator cancels unfinished answers.

    In a stream, the logprobs of a piece are charged until the next piece is asked for. Other data stays charged until
    the charge ends.

    Raises:
        ApiError: a worker failed, no worker is left, or the answer takes too much memory.
    """
    if len(call.tokens) == 1:
        answers = answers_of(fleet, call, 0) if call.held is None else answers_of_branch(call, call.held)
        async with aclosing(answers) as chunks:
            async for chunk in chunks:
                await _charged(fleet, memory, call, chunk)
                yield StreamPiece(0, chunk)
                memory.give_back(told_bytes_of(call.ask, chunk))
        return
    queue: asyncio.Queue[StreamPiece | None] = asyncio.Queue()
    room = asyncio.Semaphore(QUEUED_MAX)

    async def read(number: int) -> None:
        async with aclosing(answers_of(fleet, call, number)) as chunks:
            async for chunk in chunks:
                await _charged(fleet, memory, call, chunk)
                await room.acquire()
                queue.put_nowait(StreamPiece(number, chunk))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(call.tokens)):
                    group.create_task(read(number))
        except* ApiError as errors:
            _clear(queue)  # The waiting pieces are no longer charged, so they must not stay in memory.
            raise errors.exceptions[0] from None
        finally:
            queue.put_nowait(None)

    reading = asyncio.create_task(read_all())
    try:
        while (piece := await queue.get()) is not None:
            yield piece
            room.release()
            memory.give_back(told_bytes_of(call.ask, piece.chunk))
        await reading
    finally:
        reading.cancel()
        await asyncio.wait((reading,))
        _clear(queue)
        del reading  # Breaks a reference cycle: the task's error refers to this frame.


def _clear(queue: asyncio.Queue[StreamPiece | None]) -> None:
    while not queue.empty():
        queue.get_nowait()


async def _charged(fleet: Fleet, memory: Charge, call: Call, chunk: Chunk) -> None:
    """Charges the bytes that a chunk takes until it is sent. After a large chunk, lets other tasks run first.

    Raises:
        ApiError: there is not enough memory left.
    """
    byte_count = bytes_of(call.ask, chunk)
    if byte_count and not memory.add(byte_count):
        memory.end()  # The memory is free at once for other requests that reach the limit just now.
        raise full_of_answers()
    if byte_count > LARGE_BYTES:
        async with fleet.turn:
            await asyncio.sleep(0)


async def prefilled(
    fleet: Fleet,
    model: Model,
    tokens: tuple[int, ...],
    namespace: str,
    *,
    ttl_s: float,
    timeout_s: float,
    names: Mapping[str, str],
    cache: CachePolicy | None = None,
) -> Held:
    """Returns a new branch of these tokens, at the first worker that accepts it.

    Raises:
        ApiError: a worker refuses the branch, or no worker answers.
    """
    asked: list[Backend] = []
    refusal = unavailable("no worker answers")
    while (backend := fleet.backend(model, tokens, namespace, asked)) is not None:
        asked.append(backend)
        try:
            with busy(backend):
                branch = await backend.client.prefill(
                    tokens, namespace=namespace, ttl_s=ttl_s, timeout_s=timeout_s, cache=cache
                )
            return Held(backend, branch)
        except QuireError as error:
            refusal = of_quire(error, names)
            if error.code not in ELSEWHERE:
                raise refusal from None
    raise refusal
