"""From the bytes of a body to what its caller asks: small ones at once, large ones on a thread.

A JSON text becomes up to sixty times its size as objects, so values are counted before any is made.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from quire_gateway.failures import ApiError, missing

AT_ONCE_BYTES: Final = 16 << 10  # larger ones are read on a thread
LISTS_MAX: Final = 1 << 16  # and objects, in one body
TEXTS_MAX: Final = 1 << 16  # and names: 8 for each message, and some milliseconds in which nobody else computes
VALUES_MAX: Final = 1 << 19  # a prompt of token ids is a value for each
PARAM_SHOWN: Final = 256  # characters of the place of a fault
VALUE_SHOWN: Final = 64  # characters of a wrong value
_CODINGS: Final = {b"content-encoding": (b"", b"identity"), b"transfer-encoding": (b"chunked",)}
_FORMS: Final = {  # of a value that is out of its range
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
}
_KINDS: Final = {  # of a value of another type
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",  # 1e300 is none that anybody counts with
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",  # in a query
    "string_type": "a text",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
BodyT = TypeVar("BodyT", bound=BaseModel)
AskT = TypeVar("AskT")


class Reader:
    """Reads bodies. One thread reads large ones, so that two of them do not take the interpreter for twice as long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "quire-bodies")

    async def ask(self, body: bytes, content_type: str, kind: type[BodyT], ask_of: Callable[[BodyT], AskT]) -> AskT:
        """Returns what a body asks.

        Raises:
            ApiError: it is no JSON, or asks for what is not served.
        """
        check_type(content_type)
        if len(body) <= AT_ONCE_BYTES:
            return ask_of(read(body, kind))
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: ask_of(read(body, kind)))


def check_type(content_type: str) -> None:
    """Refuses a body that does not say that it is JSON. Pages cannot say so of another origin without being asked.

    Raises:
        ApiError: it does not.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the body is to be JSON, with Content-Type: application/json")


def check_codings(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuses a body that is compressed, or in a transfer coding other than chunks, instead of reading it as it is.

    Raises:
        ApiError: it is.
    """
    for name, value in headers:
        coding = value.strip().lower()
        if coding not in _CODINGS.get(name, (coding,)):
            what = f"{name.decode()} {coding[:64].decode('latin-1')!r}"
            raise ApiError(415, f"the body has the {what}, which is not read here: send it as it is")


def read(body: bytes, kind: type[BodyT]) -> BodyT:
    """Returns the fields of a body.

    Raises:
        ApiError: it is no JSON, has too many values, or a field is wrong.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # which PowerShell and some .NET clients send
    check_values(body)
    try:
        given = from_json(body, allow_inf_nan=False, cache_strings="none")  # which would take half as long again
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body is to be a JSON object, not {_kind_of(given)}")
    known = kind.__pydantic_fields__
    for name in given:
        if name not in known and given[name] is not None:
            shown = name[:PARAM_SHOWN]
            what = f"Unrecognized request argument supplied: {shown}"
            raise ApiError(400, what, param=shown, code="unknown_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False)) from None


def check_values(body: bytes) -> None:
    """Refuses a body of more values than are ever needed, before they are made.

    Raises:
        ApiError: it is one.
    """
    if _are_few(body):
        return
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes are those around texts
    if outside.count(b'"') > 2 * TEXTS_MAX:
        raise _too_many("texts", TEXTS_MAX)
    outside = b"".join(outside.split(b'"')[::2])
    if outside.count(b",") > VALUES_MAX:
        raise _too_many("values", VALUES_MAX)
    if outside.count(b"[") + outside.count(b"{") > LISTS_MAX:
        raise _too_many("arrays and objects", LISTS_MAX)


def _are_few(body: bytes) -> bool:
    """Tells whether there are few values even if all that looks like one is one. Most bodies are so."""
    return (
        body.count(b",") <= VALUES_MAX
        and body.count(b"[") + body.count(b"{") <= LISTS_MAX
        and body.count(b'"') <= 2 * TEXTS_MAX
    )


def _too_many(what: str, count_max: int) -> ApiError:
    return ApiError(413, f"the body of a request has at most {count_max:,} {what}", code="request_too_large")


def of_validation(found: Sequence[Any]) -> ApiError:
    """Returns what is wrong with a body, in one sentence about its first fault.

    Where a field may be one of several things, each of them has a fault; the one that comes furthest is told.
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
    """Tells whether a place names an alternative of a type, which no caller has written."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "bool", "StreamOptions"))


def _shown(value: object) -> str:
    """Returns a wrong value as its caller has written it, or what kind of value it is."""
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
    return "a text" if isinstance(value, str) else "an object" if isinstance(value, dict) else "an array"
