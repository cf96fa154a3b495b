"""A request that is ready to be sent to a worker, and the branch that it continues."""

from __future__ import annotations

from typing import NamedTuple

from quire import AsyncBranch
from quire.sampling import CachePolicy

from quire_gateway.asks import Ask
from quire_gateway.backend import Backend, Model
from quire_gateway.calls.plans import CallPlan
from quire_gateway.entries import Entry


class Held(NamedTuple):
    """A branch, and the worker that holds it."""

    backend: Backend
    branch: AsyncBranch


class Call(NamedTuple):
    """One request that is ready to be sent.

    Attributes:
        ask: the caller's request, translated for the workers.
        model: the model that answers.
        tokens: the tokens of each prompt.
        namespace: the namespace of its shared prefixes.
        request_id: the id in the logs of gateway and workers.
        timeout_s: the deadline of the whole request.
        entry: its entry in the list of requests.
        as_split: the tokenizer's tokens of the prompts. A prompt that continues an answer has other `tokens`.
        plan: how its answers are parsed; None for plain text.
        held: the branch that is continued. Its single prompt is empty here, because the worker has the tokens.
        cache: the options of the cache for the worker.
    """

    ask: Ask
    model: Model
    tokens: tuple[tuple[int, ...], ...]
    namespace: str
    request_id: str
    timeout_s: float
    entry: Entry
    as_split: tuple[tuple[int, ...], ...] = ()
    plan: CallPlan | None = None
    held: Held | None = None
    cache: CachePolicy | None = None
