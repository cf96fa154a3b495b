"""Content, reasoning and calls in the text of an answer, as pieces and as a whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CallDelta(NamedTuple):
    """A piece of a call.

    Attributes:
        number: the number of the call in its answer, from 0.
        arguments: the next part of the JSON text of its arguments.
        call_id: the id of the call; only in its first piece.
        function: name of the called function; only in its first piece.
    """

    number: int
    arguments: str = ""
    call_id: str = ""
    function: str = ""


class Delta(NamedTuple):
    """A piece of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Tells whether the piece has any content, reasoning or calls."""
        return bool(self.content or self.reasoning or self.calls)


class OpenCall(NamedTuple):
    """A call that is complete."""

    call_id: str
    function: str
    arguments: str


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[OpenCall]]:
    """Returns the content, reasoning and calls of all pieces."""
    calls: list[OpenCall] = []
    for piece in (each for delta in deltas for each in delta.calls):
        if piece.call_id:
            calls.append(OpenCall(piece.call_id, piece.function, piece.arguments))
        else:
            call = calls[piece.number]
            calls[piece.number] = call._replace(arguments=call.arguments + piece.arguments)
    content = "".join(delta.content for delta in deltas)
    return content, "".join(delta.reasoning for delta in deltas), calls


def joined_pieces(one: Delta, other: Delta) -> Delta:
    """Returns two successive pieces as one."""
    return Delta(one.content + other.content, one.reasoning + other.reasoning, merged([*one.calls, *other.calls]))


def merged(pieces: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Returns successive pieces of calls with one piece for each call."""
    calls: list[CallDelta] = []
    for call in pieces:
        if calls and calls[-1].number == call.number:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + call.arguments)
        else:
            calls.append(call)
    return tuple(calls)
