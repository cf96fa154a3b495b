"""Checks callers' numbers before anything is sent: type, range and finiteness. Errors name the caller's parameter.

protobuf accepts True as a number and infinity as a temperature, and its errors name wire types such as int64.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quire._numbers import shown
from quire.errors import InvalidArgumentError, Reason
from quire.v1.worker_pb2 import SamplingParams

INT32_MAX: Final = 2**31 - 1
_FLOAT32_MAX: Final = 3.4028234663852886e38


class Range(NamedTuple):
    """The numbers that a parameter accepts: from `low` to `high`, both included, and `besides` if given."""

    low: float
    high: float
    is_integer: bool = False
    besides: float | None = None
    words: str = ""

    def __str__(self) -> str:
        return self.words or f"{'an integer ' if self.is_integer else ''}from {self.low} to {self.high}"


UINT32: Final = Range(0, 2**32 - 1, is_integer=True)
# Ranges of `SamplingParams`, same as in the worker (quire_worker/sampling/params.py). A test compares the two.
SAMPLING: Final = {
    "max_tokens": Range(1, INT32_MAX, is_integer=True),
    "temperature": Range(1e-3, 100.0, besides=0, words="0 or from 0.001 to 100.0"),
    "top_k": Range(0, INT32_MAX, is_integer=True),
    "top_p": Range(math.ulp(0.0), 1, words="above 0 and at most 1"),
    "seed": Range(0, 2**64 - 1, is_integer=True),
    "n": Range(1, 64, is_integer=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "min_tokens": Range(0, INT32_MAX, is_integer=True),
    "logprobs": Range(0, 20, is_integer=True),
    "prompt_logprobs": Range(0, 20, is_integer=True),
    "best_of": Range(1, 64, is_integer=True),
    "num_beams": Range(1, 64, is_integer=True),
    "length_penalty": Range(-5.0, 5.0),
    "logit_bias": Range(-100.0, 100.0),
}
_WIRE: Final = {
    FieldDescriptor.CPPTYPE_INT32: Range(-(2**31), INT32_MAX, is_integer=True),
    FieldDescriptor.CPPTYPE_INT64: Range(-(2**63), 2**63 - 1, is_integer=True),
    FieldDescriptor.CPPTYPE_UINT32: UINT32,
    FieldDescriptor.CPPTYPE_UINT64: Range(0, 2**64 - 1, is_integer=True),
    FieldDescriptor.CPPTYPE_FLOAT: Range(-_FLOAT32_MAX, _FLOAT32_MAX),
}


def check(
    name: str,
    value: Any,
    allowed: Range,
    reason: Reason = Reason.BAD_PARAMETER,
    request_id: str | None = None,
    *,
    field: str | None = None,
) -> None:
    """Refuses a value that is not a number in the range. The error's field is `field`, by default the name.

    Raises:
        TypeError: the value is not a number, or not an integer as required. True and False are not numbers here.
        InvalidArgumentError: the value is out of range, or not finite.
    """
    if not _is_number(value, allowed):
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}")
    if not (allowed.low <= value <= allowed.high or value == allowed.besides):
        raise InvalidArgumentError(
            f"{name} must be {allowed}, not {shown(value)}", reason, request_id, field=field or name
        )


def check_field(message: Any, name: str, value: Any, reason: Reason, request_id: str | None) -> None:
    """Refuses a number or boolean that a message's field does not accept. Raises the same errors as `check`."""
    allowed = _range_of(message.DESCRIPTOR, name)
    if allowed is None:
        if not isinstance(value, bool) and _is_flag(message.DESCRIPTOR, name):
            raise TypeError(f"{name} must be True or False, not {shown(value)}")
    elif type(value) is not int or not allowed.low <= value <= allowed.high:  # Few values reach this slow path.
        check(name, value, allowed, reason, request_id)


@cache
def _range_of(message: Descriptor, name: str) -> Range | None:
    if message.full_name == SamplingParams.DESCRIPTOR.full_name and name in SAMPLING:
        return SAMPLING[name]
    return _WIRE.get(message.fields_by_name[name].cpp_type)


@cache
def _is_flag(message: Descriptor, name: str) -> bool:
    return message.fields_by_name[name].cpp_type == FieldDescriptor.CPPTYPE_BOOL


def _is_number(value: Any, allowed: Range) -> bool:
    if type(value) is int or (type(value) is float and not allowed.is_integer):
        return True
    # Other numeric types, such as numpy's, are accepted.
    if isinstance(value, (bool, str, bytes, bytearray)):
        return False
    try:
        (operator.index if allowed.is_integer else float)(value)
    except (TypeError, ValueError):
        return False
    return True
