"""Parses request bodies into the callers' requests. Small bodies are parsed at once, large ones on a thread.

A JSON text can take sixty times its size as objects, so values are counted before they are parsed.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from quire_gateway.failures import ApiError, missing, would_be_rounded
from quire_gateway.schemas import rounded

AT_ONCE_BYTES: Final = 16 << 10  # larger bodies are parsed on a thread
LISTS_MAX: Final = 1 << 16  # arrays and objects in one body
# Strings and names in one body, for example 8 in each of 8,192 messages. Parsing that many delays other requests by
# milliseconds.
TEXTS_MAX: Final = 1 << 16
STRUCTURES_CHARACTERS_MAX: Final = 1 << 20  # characters in tools and JSON schemas; workers allow no more in a prompt
VALUES_MAX: Final = 1 << 19  # values in one body; each token id of a prompt is a value
PARAM_SHOWN: Final = 256  # characters of a wrong field's path that an error shows
VALUE_SHOWN: Final = 64  # characters of a wrong value that an error shows
_CODINGS: Final = {b"content-encoding": (b"", b"identity"), b"transfer-encoding": (b"chunked",)}
_FORMS: Final = {  # errors for values out of range
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
}
_KINDS: Final = {  # errors for values of a wrong type
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",  # the error for numbers like 1e300
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",  # the error for a field in the query of a URL
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
# Fields with schemas that constrain answers. Numbers in schemas must not be rounded; those of other fields may be.
_STRUCTURES: Final = ("response_format", "structured_outputs", "guided_json", "tools", "functions", "text")
BodyT = TypeVar("BodyT", bound=BaseModel)
AskT = TypeVar("AskT")


class Reader:
    """Parses bodies. A single thread parses large ones: two at once would only block the interpreter for longer."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "quire-bodies")

    async def ask(self, body: bytes, content_type: str, kind: type[BodyT], ask_of: Callable[[BodyT], AskT]) -> AskT:
        """Returns the result of `ask_of` for the fields of a body.

        Raises:
            ApiError: the body is not JSON, or asks for something that is not supported.
        """
        check_type(content_type)
        if len(body) <= AT_ONCE_BYTES:
            return ask_of(read(body, kind))
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: ask_of(read(body, kind)))


def check_type(content_type: str) -> None:
    """Refuses a body with a content type other than JSON. Pages cannot send that type to another origin without a
    preflight.

    Raises:
        ApiError: the type is another one.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the body must be JSON, with Content-Type: application/json")


def check_codings(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuses a body that is compressed, or has a transfer coding other than chunked.

    Raises:
        ApiError: the body is compressed, or has another transfer coding.
    """
    for name, value in headers:
        coding = value.strip().lower()
        if coding not in _CODINGS.get(name, (coding,)):
            what = f"{name.decode()} {coding[:64].decode('latin-1')!r}"
            raise ApiError(415, f"the body has the {what}, which is not supported: send it without")


def read(body: bytes, kind: type[BodyT]) -> BodyT:
    """Returns the fields of a body.

    Raises:
        ApiError: it is not JSON, has too many values, a field is wrong, or a number of a structure would be rounded.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # PowerShell and some .NET clients send a byte order mark.
    check_values(body)
    try:
        # Caching strings would take 1.5 times as long.
        given = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind_of(given)}")
    known = kind.__pydantic_fields__
    for name in given:
        if name not in known and given[name] is not None:
            shown = name[:PARAM_SHOWN]
            what = f"Unrecognized request argument supplied: {shown}"
            raise ApiError(400, what, param=shown, code="unknown_parameter")
    _check_texts([given[name] for name in _STRUCTURES if name in given])
    structures = [name for name in _STRUCTURES if isinstance(given.get(name), dict | list)]
    if structures and (number := rounded(body, structures)) is not None:
        raise would_be_rounded(str(number.field), number.written)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False)) from None


def check_values(body: bytes) -> None:
    """Refuses a body with too many values before it is parsed.

    Raises:
        ApiError: the body has too many values.
    """
    if _are_few(body):
        return
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # The remaining quotes begin and end strings.
    if outside.count(b'"') > 2 * TEXTS_MAX:
        raise _too_many("strings", TEXTS_MAX)
    outside = b"".join(outside.split(b'"')[::2])
    if outside.count(b",") > VALUES_MAX:
        raise _too_many("values", VALUES_MAX)
    if outside.count(b"[") + outside.count(b"{") > LISTS_MAX:
        raise _too_many("arrays and objects", LISTS_MAX)


def _check_texts(waiting: list[Any]) -> None:
    """Refuses structures with more text than a worker takes in a prompt.

    Raises:
        ApiError: the structures have more text.
    """
    left = STRUCTURES_CHARACTERS_MAX
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            left -= len(part)
        elif isinstance(part, dict):
            waiting += part.keys()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        if left < 0:
            what = f"tools and structures may have at most {STRUCTURES_CHARACTERS_MAX:,} characters"
            raise ApiError(413, what, code="request_too_large")


def _are_few(body: bytes) -> bool:
    """Tells whether there are few values even if every character that looks like one counts. Most bodies have few."""
    return (
        body.count(b",") <= VALUES_MAX
        and body.count(b"[") + body.count(b"{") <= LISTS_MAX
        and body.count(b'"') <= 2 * TEXTS_MAX
    )


def _too_many(what: str, count_max: int) -> ApiError:
    return ApiError(413, f"the body of a request may have at most {count_max:,} {what}", code="request_too_large")


def of_validation(found: Sequence[Any]) -> ApiError:
    """Returns an error with one sentence about the first fault of a body.

    A field with several possible types has a fault for each of them. The fault with the deepest path is reported.
    """
    faults = [(_place(fault), fault) for fault in found if fault["loc"][:1] == found[0]["loc"][:1]]
    where, fault = max(faults, key=lambda each: (len(each[0]), each[1]["type"] not in _KINDS))
    param = "".join(where).lstrip(".")[:PARAM_SHOWN] or None
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return missing(param)
    if kind in _FORMS:
        bound, form = _FORMS[kind]
        limit = context[bound]
        message = (
            f"{form.format(f'{limit:g}' if isinstance(limit, float) else f'{limit:,}')}, not {_shown(fault['input'])}"
        )
    elif kind in _KINDS:
        kinds = dict.fromkeys(_KINDS[each["type"]] for place, each in faults if place == where)
        message = f"must be {' or '.join(kinds)}, not {_shown(fault['input'])}"
    elif kind.endswith(("too_long", "too_short")):
        bound = "at most" if kind.endswith("too_long") else "at least"
        count = context.get("max_length", context.get("min_length"))
        what = "character" if kind.startswith("string") else "item"
        message = f"must have {bound} {count:,} {what if count == 1 else f'{what}s'}"
    elif kind == "literal_error":
        others = dict.fromkeys(_KINDS[each["type"]] for _, each in faults if each["type"] in _KINDS)
        given = fault["input"]
        shown = repr(given[:VALUE_SHOWN]) if isinstance(given, str) else _shown(given)
        message = f"must be {' or '.join([context['expected'], *others])}, not {shown}"
    else:
        message = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)


def _place(fault: Any) -> list[str]:
    parts = [part for part in fault["loc"] if not _is_of_a_union(part)]
    return [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts]


def _is_of_a_union(part: object) -> bool:
    """Tells whether a part of a path names an alternative of a type, which is not in the caller's body."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "bool", "StreamOptions"))


def _shown(value: object) -> str:
    """Returns a wrong value as the caller wrote it, or its kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)[:VALUE_SHOWN]
    return _kind_of(value)


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return "true or false" if isinstance(value, bool) else "a number"
    return "a string" if isinstance(value, str) else "an object" if isinstance(value, dict) else "an array"
