"""Requests, one after another. The texts of requests form trees: a text continues another text, or diverges from it.

A *stretch* is a piece of text that follows one certain stretch, so equal stretches mean equal prefixes. A block is
identified by the stretch where it ends and its place there, so digests need no text and no hashing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

DIGEST_TOKENS: Final = 16  # every block size is a multiple of this
DIGEST_BYTES: Final = 32
TRACE_BLOCK_TOKENS: Final = 512
_NUMBERS = count(1)


class Stretch:
    """A piece of text that follows its parent.

    Attributes:
        parent: the previous stretch; None at the beginning of a text.
        number: a unique number.
        end: the tokens of this stretch and all its ancestors.
    """

    __slots__ = ("end", "number", "parent")

    def __init__(self, parent: Stretch | None, token_count: int) -> None:
        assert token_count > 0
        self.parent = parent
        self.number = next(_NUMBERS)
        self.end: int = (parent.end if parent else 0) + token_count

    def then(self, token_count: int) -> Stretch:
        """Returns a new text that continues this one. The new stretch differs from all other continuations."""
        return Stretch(self, token_count)

    def block_ids(self) -> list[int]:
        """Returns one number for each full block of `DIGEST_TOKENS` tokens; equal ones mean equal prefixes.

        A block belongs to the stretch where it ends. Example: with stretches of 24 and 40 tokens, the second block
        (tokens 16 to 31) belongs to the second stretch.
        """
        path: list[Stretch] = []
        stretch: Stretch | None = self
        while stretch is not None:
            path.append(stretch)
            stretch = stretch.parent
        ids: list[int] = []
        for stretch in reversed(path):
            base = stretch.number << 32
            ids.extend(range(base + len(ids), base + stretch.end // DIGEST_TOKENS))
        return ids


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a prompt and its answer.

    Attributes:
        prompt: the text that is sent.
        text: prompt and answer.
    """

    prompt: Stretch
    text: Stretch

    def digests(self, block_tokens: int) -> bytes:
        """Returns the concatenated digests of all full blocks of `block_tokens` tokens, including the answer's."""
        step = block_tokens // DIGEST_TOKENS
        return b"".join([block.to_bytes(DIGEST_BYTES) for block in self.text.block_ids()[step - 1 :: step]])

    @property
    def prompt_token_count(self) -> int:
        """Counts the tokens of the prompt."""
        return self.prompt.end

    @property
    def computed_token_count(self) -> int:
        """Counts the tokens that the model reads: all but the last one of the answer."""
        return self.text.end - 1


def ask(prompt: Stretch, answer_token_count: int) -> Request:
    """Returns a request and its answer."""
    return Request(prompt, prompt.then(answer_token_count))


class Scale(NamedTuple):
    """The sizes of the workloads.

    Attributes:
        chat_count: chats that take turns.
        round_count: turns of each chat.
        first_tokens: tokens of each chat's first message, a document.
        message_tokens: tokens of every later message.
        answer_tokens: tokens of every answer.
        system_tokens: tokens of a system prompt.
        system_count: number of system prompts.
        user_count: users of each system prompt.
        task_count: children of every inner node in the tree of agents.
        session_share: one in this many sessions of the trace is kept.
        trace_tokens_max: longer prompts of the trace are left out.
    """

    chat_count: int
    round_count: int
    first_tokens: int
    message_tokens: int
    answer_tokens: int
    system_tokens: int
    system_count: int
    user_count: int
    task_count: int
    session_share: int
    trace_tokens_max: int


FULL_SCALE: Final = Scale(24, 8, 8_000, 200, 150, 6_000, 16, 16, 6, 15, 32_768)
QUICK_SCALE: Final = Scale(12, 5, 2_500, 100, 60, 2_000, 12, 5, 5, 15, 4_096)


def chats_in_turn(scale: Scale) -> Iterator[Request]:
    """Yields rounds. In each, every chat sends its whole text so far and a new message."""
    dice = random.Random(1)
    texts = [Stretch(None, scale.first_tokens + dice.randrange(64)) for _ in range(scale.chat_count)]
    for _ in range(scale.round_count):
        for number, text in enumerate(texts):
            request = ask(text, scale.answer_tokens + dice.randrange(32))
            yield request
            texts[number] = request.text.then(scale.message_tokens + dice.randrange(32))


def edited_turns(scale: Scale) -> Iterator[Request]:
    """Yields chats that take turns. Every message is sent again one round later, edited somewhere in its middle."""
    dice = random.Random(2)
    texts = [Stretch(None, scale.first_tokens + dice.randrange(64)) for _ in range(scale.chat_count)]
    edited: list[Stretch | None] = [None] * scale.chat_count
    for _ in range(scale.round_count + scale.round_count // 2):
        for number, text in enumerate(texts):
            kept = edited[number]
            if kept is None:
                half = text.then(1 + scale.message_tokens // 2 + dice.randrange(32))
                yield ask(half.then(1 + dice.randrange(scale.message_tokens)), scale.answer_tokens)
                edited[number] = half
            else:
                request = ask(kept.then(1 + dice.randrange(scale.message_tokens)), scale.answer_tokens)
                yield request
                texts[number], edited[number] = request.text, None


def shared_prompts(scale: Scale) -> Iterator[Request]:
    """Yields requests of users who share only one of several system prompts. Each user asks twice, the second time a
    little later."""
    dice = random.Random(3)
    systems = [Stretch(None, scale.system_tokens + dice.randrange(64)) for _ in range(scale.system_count)]
    waiting: list[Stretch] = []
    for user in range(scale.user_count * scale.system_count):
        message = systems[user % scale.system_count].then(scale.message_tokens * 2 + dice.randrange(64))
        request = ask(message, scale.answer_tokens)
        yield request
        waiting.append(request.text.then(scale.message_tokens))
        if len(waiting) > scale.system_count // 2:
            yield ask(waiting.pop(dice.randrange(len(waiting))), scale.answer_tokens)


def agents(scale: Scale) -> Iterator[Request]:
    """Yields requests of a tree: a common prompt, its tasks, and each task's agents, which take turns to add steps."""
    dice = random.Random(4)
    root = Stretch(None, scale.system_tokens)
    tasks = [root.then(scale.first_tokens // 4 + dice.randrange(64)) for _ in range(scale.task_count)]
    for task in tasks:
        yield ask(task, scale.answer_tokens)
    texts = [
        task.then(scale.message_tokens * 2 + dice.randrange(64))
        for _ in range(scale.task_count)
        for task in tasks
    ]  # fmt: skip
    for _ in range(scale.round_count):
        for number in dice.sample(range(len(texts)), len(texts)):
            request = ask(texts[number], scale.answer_tokens)
            yield request
            texts[number] = request.text.then(scale.message_tokens + dice.randrange(32))


def trace(file: Path, session_share: int, token_count_max: int, sample: int = 0) -> Iterator[Request]:
    """Yields the requests of one in `session_share` sessions of a trace, in order, without the longest.

    The kept sessions repeat as often and as soon as before, but among fewer sessions. So the working set shrinks with
    the share (spatial sampling, Waldspurger et al., FAST '15). Requests with the same second block are one session; the
    first block is a system prompt that almost all share.

    Args:
        file: a line of JSON per request. `hash_ids` has one id per block of 512 prompt tokens; prompts that share a
            prefix have equal ids at their start. `input_length` and `output_length` are in tokens.
        session_share: 1 for all sessions.
        sample: the number of the sample, less than `session_share`. Different samples share no session.
        token_count_max: longer prompts are left out: the pool of a sample has to hold one of them beside all others.
    """
    known: dict[tuple[int, int], Stretch] = {}
    sessions: dict[int, int] = {}
    with file.open() as lines:
        for line in lines:
            fields = json.loads(line)
            session = fields["hash_ids"][:2][-1]
            number = sessions.setdefault(session, len(sessions))
            if number % session_share != sample or fields["input_length"] > token_count_max:
                continue
            prompt, left = None, fields["input_length"]
            for block in fields["hash_ids"]:
                key = block, min(left, TRACE_BLOCK_TOKENS)
                left -= key[1]
                prompt = known[key] = known.get(key) or Stretch(prompt, key[1])
            assert prompt is not None
            yield ask(prompt, max(fields["output_length"], 1))


WORKLOADS: Final[dict[str, Callable[[Scale], Iterator[Request]]]] = {
    "chats": chats_in_turn,
    "edits": edited_turns,
    "shared": shared_prompts,
    "agents": agents,
}
TRACE: Final = "trace"
