"""The choices of one answer, as far as they have arrived."""

from __future__ import annotations

import secrets
import string
from array import array
from dataclasses import dataclass, field
from typing import Final

from quire.sampling import Chunk, FinishReason

from quire_gateway.calls.deltas import Delta, joined_pieces
from quire_gateway.calls.reader import AnswerReader
from quire_gateway.fleet import Fleet
from quire_gateway.prepared_call import Call
from quire_gateway.probabilities import Columns, Places
from quire_gateway.spelling import Speller

_ID_CHARACTERS: Final = string.ascii_letters + string.digits


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it has arrived."""

    speller: Speller  # finds the bytes of the choice's tokens
    texts: list[str] = field(default_factory=list)
    told: Columns = field(default_factory=Columns)  # tokens whose logprobs were not sent yet
    places: Places = field(default_factory=Places)
    # ids of the choice's tokens; empty for a stream that does not count reasoning
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    token_count: int = 0
    reader: AnswerReader | None = None  # None: the whole answer is content
    # the content, reasoning and calls so far; only for an answer that is sent as a whole
    deltas: list[Delta] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    is_opened: bool = False
    has_piece: bool = False  # whether a piece was sent

    def read(self, chunk: Chunk) -> Delta:
        """Returns the content, reasoning and calls that a chunk adds."""
        if self.reader is None:
            return Delta(chunk.text)
        delta = self.reader.push(chunk.text)
        return delta if chunk.finish_reason is None else joined_pieces(delta, self.reader.flush())


def begin_choices(fleet: Fleet, call: Call) -> list[Choice]:
    """Returns the choices of a call, ordered by prompt, before their first token."""
    plan, ask = call.plan, call.ask
    found = []
    for prompt, tokens in zip(ask.prompts, call.tokens, strict=True):
        before: tuple[int, ...] = tokens
        keeps_special = ask.options.get("skip_special_tokens") is False
        if ask.options.get("echo"):
            before, keeps_special = (), not isinstance(prompt, str)
        for _ in range(ask.choice_count):
            speller = Speller(fleet, call.model, before, keeps_special=keeps_special)
            found.append(Choice(speller, reader=None if plan is None else plan.reader(_new_id)))
    return found


def _new_id(count: int) -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(count))
