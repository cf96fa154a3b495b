"""The output of a request to its caller: its deliveries, and how far the caller has read them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import QuireError

if TYPE_CHECKING:  # The worker's options read numbers from this folder without torch.
    from quire_worker.sampling.packed_logprobs import PackedLogprobs

# Seconds between two deliveries of a request, except for its first delivery and the last delivery of each sample.
STREAM_INTERVAL_S = 0.02


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"  # end-of-text, a stop token or a stop text
    LENGTH = "length"  # the sample has `max_tokens` tokens, or is the longest sequence that fits


class Delivery(NamedTuple):
    """Something for the caller of a request: new tokens of one sample, its end, or both.

    Attributes:
        is_last: whether it is the last delivery of the request.
        logprobs: logprobs of the tokens; None if they were not requested.
        prompt_logprobs: logprobs of the prompt; only in the request's first delivery.
        score: the score of a beam search's text.
        stop_reason: the stop text or stop token that ended the sample.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    is_last: bool
    logprobs: PackedLogprobs | None = None
    prompt_logprobs: PackedLogprobs | None = None
    score: float | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, eq=False)
class Output:
    """Slot of a request for its caller; see `requests/outbox.py`.

    Attributes:
        deliveries: the queue that the caller reads; a `QuireError` in it ends the request.
        delivered_s: the time of the latest delivery, by the event loop's clock.
        interval_s: the least seconds that the caller wants between two deliveries.
        prompt_logprobs: computed logprobs of the prompt from the second token on, until they are delivered.
        is_read: whether the caller has taken the last delivery.
        unread_bytes: bytes of the answer that count as unread.
        being_read_bytes: the part of `unread_bytes` that is being written to the caller.
    """

    deliveries: asyncio.Queue[Delivery | QuireError] = field(default_factory=asyncio.Queue)
    delivered_s: float = -math.inf
    interval_s: float = 0.0
    prompt_logprobs: PackedLogprobs | None = None
    is_read: bool = False
    unread_bytes: int = 0
    being_read_bytes: int = 0
