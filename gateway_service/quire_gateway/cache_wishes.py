"""Reads what callers say about the cache, in OpenAI's and Anthropic's words. Pure.

| words | time to keep |
| --- | --- |
| `prompt_cache_retention` "24h" | a day, the whole prompt and its answer |
| `prompt_cache_options` with `ttl` "30m", the default | `ttl`; in `mode` "explicit" only what is marked |
| `prompt_cache_breakpoint` of a content part | the `ttl` of the options, up to the end of its message |
| `cache_control` of a content part, `ttl` "5m" (the default) or "1h" | `ttl`, up to the end of its message |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire.protocol.limits import KEEP_MS_MAX

from quire_gateway.bodies import ChatBody
from quire_gateway.failures import invalid

MARKS_MAX: Final = 4  # parts of a request that may be marked; OpenAI and Anthropic have the same limit
_TTL: Final = re.compile(r"([1-9][0-9]{0,5})([smh])")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_OPTIONS_TTL: Final = "30m"
_CONTROL_TTL: Final = "5m"
_RETENTION_MS: Final = {"in_memory": 0, "in-memory": 0, "24h": KEEP_MS_MAX}


class Wish(NamedTuple):
    """How long a request's prefix should stay cached.

    Attributes:
        keep_ms: milliseconds from the end of the request; 0 if the prefix may be evicted at any time.
        message_counts: rising counts of leading messages, one for each mark; messages after the last mark are not kept.
            Empty keeps the whole prompt and its answer.
        is_hidden: whether no other request may hit the blocks of this one.
    """

    keep_ms: int = 0
    message_counts: tuple[int, ...] = ()
    is_hidden: bool = False


def wish_of(body: ChatBody) -> Wish:
    """Returns what a chat's body wishes.

    Raises:
        ApiError: a word about the cache has no meaning, more parts are marked than a request may mark, or the prompt is
            to be kept and not to be stored.
    """
    wish = _wish_to_keep(body)
    if not body.cache_no_store:
        return wish
    if wish.keep_ms:
        raise invalid("cache_no_store", "cache_no_store cannot be combined with a wish to keep the prompt cached")
    return Wish(is_hidden=True)


def _wish_to_keep(body: ChatBody) -> Wish:
    keep_ms = _retention(body.prompt_cache_retention)
    options, is_explicit = body.prompt_cache_options, False
    ttl_ms = _ttl((options or {}).get("ttl"), _OPTIONS_TTL, "prompt_cache_options.ttl")
    if options is not None:
        mode = options.get("mode", "implicit")
        if mode not in ("implicit", "explicit"):
            raise invalid("prompt_cache_options.mode", 'prompt_cache_options.mode must be "implicit" or "explicit"')
        is_explicit = mode == "explicit"
        keep_ms = keep_ms if is_explicit else max(keep_ms, ttl_ms)
    marks = _marks(body, ttl_ms)
    if keep_ms and not is_explicit:
        return Wish(max(keep_ms, *marks.values()) if marks else keep_ms)
    return Wish(max(marks.values()), tuple(sorted(marks))) if marks else Wish()


def of_ttl(ttl: str | None) -> Wish:
    """Returns the wish to keep a whole prompt for a time such as "30m". Without a time, the prompt may be evicted.

    Raises:
        ApiError: it is no time, or more than a day.
    """
    return Wish() if ttl is None else Wish(_ttl(ttl, "", "ttl"))


def _retention(given: str | None) -> int:
    if given is None:
        return 0
    if given not in _RETENTION_MS:
        raise invalid("prompt_cache_retention", 'prompt_cache_retention must be "in_memory" or "24h"')
    return _RETENTION_MS[given]


def _marks(body: ChatBody, ttl_ms: int) -> dict[int, int]:
    """Returns the milliseconds of each marked message, by the count of messages up to its end.

    Raises:
        ApiError: a mark has no meaning, or there are too many.
    """
    marks, count = dict[int, int](), 0
    for number, message in enumerate(body.messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages[{number}].content[{index}]"
            for name, default_ms in (("prompt_cache_breakpoint", ttl_ms), ("cache_control", None)):
                if part.get(name) is not None:
                    count += 1
                    keep_ms = _mark(part[name], name, default_ms, f"{place}.{name}")
                    marks[number + 1] = max(marks.get(number + 1, 0), keep_ms)
    if count > MARKS_MAX:
        raise invalid("messages", f"messages may have at most {MARKS_MAX} parts with a cache breakpoint, not {count}")
    return marks


def _mark(given: Any, name: str, default_ms: int | None, place: str) -> int:
    if not isinstance(given, Mapping):
        raise invalid(place, f"{place} must be an object")
    if name == "cache_control" and given.get("type") != "ephemeral":
        raise invalid(f"{place}.type", f'{place}.type must be "ephemeral"')
    if default_ms is not None and given.get("ttl") is None:
        return default_ms
    return _ttl(given.get("ttl"), _CONTROL_TTL, f"{place}.ttl")


def _ttl(given: Any, default: str, place: str) -> int:
    """Returns the milliseconds of a time such as "30m".

    Raises:
        ApiError: it is no time, or more than a day.
    """
    text = default if given is None else given
    found = _TTL.fullmatch(text) if isinstance(text, str) else None
    keep_ms = int(found[1]) * _UNIT_MS[found[2]] if found is not None else 0
    if not 0 < keep_ms <= KEEP_MS_MAX:
        raise invalid(place, f'{place} must be a time such as "5m" or "1h", up to "24h"')
    return keep_ms
