"""Numbers at the edge of every public parameter: refused with name, value and range before anything is sent.

The parameters are read from the signatures, so that a new one is tried, too. Times are in `test_timeouts.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from quire import Allocator, Branch, Client, GroupSpec, PoolSpec, Quota, SamplingParams
from quire._transport import ranges
from quire._transport.messages import pool_spec_message
from quire.errors import InvalidArgumentError
from quire.session import StepBuilder
from quire.types import GroupKind
from quire.v1 import worker_pb2 as worker_pb
from quire_worker.sampling.params import ParameterError
from quire_worker.sampling.params import SamplingParams as WorkerParams

from tests.client.servers import ScriptedServer, scripted_server, two_samples

SPEC = PoolSpec.full_attention(block_count=8, block_size=4, cache_layout="l", model_fingerprint=b"f" * 32)
NO_INTEGERS: list[Any] = ["5", True, 1.5, math.nan, math.inf, [1], -(10**5000), 10**5000, 2**64, -(2**63) - 1]
NO_NUMBERS: list[Any] = ["5", True, math.nan, math.inf, -math.inf, [1], 10**5000, 1e300]
# Called with a value for each of its numbers in turn; what is made before is made once.
GIVEN: dict[str, Any] = {
    "prompt": "p", "many": ["p"], "conversation": [{"role": "user", "content": "u"}], "pool": "p", "spec": SPEC,
    "sequence_id": 2, "token_count": 1, "parent_id": 1, "child_id": 2, "namespace": "n", "digests": b"d" * 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        scripted.answers["Generate"] = two_samples
        scripted.answers["Prefill"] = lambda _request, _context: worker_pb.PrefillResponse(
            branch_id=b"b", ttl_ms=60_000
        )
        scripted.answers["Tokenize"] = lambda _request, _context: worker_pb.TokenizeResponse(token_ids=[1])
        yield scripted


def numbers_of(function: Any) -> dict[str, bool]:
    """Returns the numbers that a function takes, and whether each is whole."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        words = set(str(parameter.annotation).split(" "))
        if words & {"int", "float"} and parameter.name != "timeout_s" and not parameter.name.startswith("_"):
            found[parameter.name] = "float" not in words
    return found


def methods_of(kind: type, *names: str) -> dict[str, dict[str, bool]]:
    every = {
        name: numbers_of(method) for name, method in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"
    }
    return {name: numbers for name, numbers in every.items() if numbers and name not in names}


def call_on(owner: Any, name: str) -> Callable[..., Any]:
    method = getattr(owner, name)
    required = {
        each.name for each in inspect.signature(method).parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }  # fmt: skip

    def call(**values: Any) -> Any:
        result = method(**{key: value for key, value in GIVEN.items() if key in required} | values)
        return next(result) if hasattr(result, "__next__") else result

    return call


def refuse(call: Callable[..., Any], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError, InvalidArgumentError)) as raised:
            call(**{name: value})
        said = getattr(raised.value, "message", str(raised.value))
        assert name in said, (name, value, said)
        assert ranges.shown(value) in said, (name, value, said)
        assert "proto" not in said.lower(), said
        assert "range" not in said, said  # protobuf's own word


OWNERS = {"client": Client, "branch": Branch, "allocator": Allocator}
METHODS = [
    (owner, method, name, is_whole)
    for owner, kind in OWNERS.items()
    for method, numbers in methods_of(kind).items()
    for name, is_whole in numbers.items()
]


@pytest.mark.parametrize(("owner", "method", "name", "is_whole"), METHODS)
def test_a_number_that_a_method_does_not_take_is_refused_before_it_is_sent(
    server: ScriptedServer, owner: str, method: str, name: str, is_whole: bool
) -> None:
    with Client(server.address) as client, Allocator(server.address) as allocator:
        made: dict[str, Callable[[], Any]] = {
            "client": lambda: client,
            "branch": lambda: client.prefill("p"),
            "allocator": lambda: allocator,
        }
        call = call_on(made[owner](), method)
        before = sum(count for called, count in server.attempts.items() if called != "Tokenize")
        refuse(call, name, NO_INTEGERS if is_whole else NO_NUMBERS)
        assert sum(count for called, count in server.attempts.items() if called != "Tokenize") == before


def opened(session: Any) -> Any:
    session.open()
    return session


@pytest.mark.parametrize(("name", "is_whole"), numbers_of(SamplingParams).items())
def test_a_number_of_sampling_is_refused_before_it_is_sent(server: ScriptedServer, name: str, is_whole: bool) -> None:
    allowed = ranges.SAMPLING[name]
    beyond = [allowed.high + 1, allowed.low - 1]
    with Client(server.address) as client:
        before = server.attempts["Generate"]
        refuse(lambda **values: client.generate("p", **values), name, [*(NO_INTEGERS if is_whole else NO_NUMBERS)])
        refuse(lambda **values: client.generate("p", **values), name, [x for x in beyond if (name, x) != ("top_k", -1)])
        assert server.attempts["Generate"] == before
        options: dict[str, Any] = {name: allowed.high}
        client.generate("p", **{"n": 1, **options})
        assert server.attempts["Generate"] == before + 1


@pytest.mark.parametrize("value", ["yes", 2, 1, 0.0, [True]])
@pytest.mark.parametrize("name", ["ignore_eos", "echo", "skip_special_tokens", "include_stop_in_output"])
def test_what_is_neither_true_nor_false_is_refused(server: ScriptedServer, name: str, value: Any) -> None:
    with Client(server.address) as client, pytest.raises(TypeError, match=f"{name} must be True or False, not"):
        client.generate("p", **{name: value})


@pytest.mark.parametrize("bias", ["1", True, math.nan, 101, -(10**5000)], ids=ranges.shown)
def test_a_bias_that_is_none_is_refused(server: ScriptedServer, bias: Any) -> None:
    with Client(server.address) as client:
        refuse(lambda **_: client.generate("p", logit_bias={5: bias}), "logit_bias", [bias])


def test_ranges_are_those_of_the_worker() -> None:
    several = {"best_of": {"n": 1}, "length_penalty": {"num_beams": 2}}
    for name, allowed in ranges.SAMPLING.items():
        for value, is_taken in [
            (allowed.low, True), (allowed.high, True), (allowed.besides, allowed.besides is not None),
            (allowed.high + 1, False), (allowed.low - 1, False),
        ]:  # fmt: skip
            if value is None:
                continue
            values: dict[str, Any] = {**several.get(name, {}), name: {5: value} if name == "logit_bias" else value}
            values |= {"max_tokens": max(value, 1)} if name == "min_tokens" and value <= allowed.high else {}
            assert is_taken_by_worker(values) is is_taken, (name, value)


def is_taken_by_worker(values: dict[str, Any]) -> bool:
    try:
        WorkerParams(**values).validate()
    except ParameterError:
        return False
    return True


def test_every_number_of_sampling_has_a_range() -> None:
    assert set(numbers_of(SamplingParams)) | {"logit_bias"} == set(ranges.SAMPLING)


def test_numbers_of_numpy_are_numbers(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.generate("p", max_tokens=np.int64(5), temperature=np.float32(0.5), top_p=Fraction(1, 2))
    sampling = server.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.5)


SPECS = {
    "block_count": lambda value: dataclasses.replace(SPEC, block_count=value),
    "watermark_block_count": lambda value: dataclasses.replace(SPEC, watermark_block_count=value),
    "chunk_token_count_max": lambda value: dataclasses.replace(SPEC, chunk_token_count_max=value),
    "block_bytes": lambda value: dataclasses.replace(SPEC, block_bytes=value),
    "first_block_id": lambda value: dataclasses.replace(SPEC, first_block_id=value),
    "block_size": lambda value: dataclasses.replace(SPEC, groups=(GroupSpec(GroupKind.FULL_ATTENTION, value),)),
    "window": lambda value: dataclasses.replace(SPEC, groups=(GroupSpec(GroupKind.SLIDING_WINDOW, 4, value),)),
    "held_blocks_max": lambda value: dataclasses.replace(SPEC, quotas=(Quota("n", value, None),)),
    "cached_blocks_max": lambda value: dataclasses.replace(SPEC, quotas=(Quota("n", None, value),)),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_number_of_a_pool_is_refused_before_it_is_sent(name: str) -> None:
    refuse(lambda **values: pool_spec_message(SPECS[name](values[name])), name, NO_INTEGERS)


def test_numbers_of_owners_are_refused_when_they_are_made(server: ScriptedServer) -> None:
    with Allocator(server.address) as allocator:
        refuse(
            lambda **values: opened(allocator.session("p", SPEC, **values)), "window", [True, "5", 1.5, 0, -(10**20)]
        )
        refuse(lambda **values: opened(allocator.engine("p", SPEC, **values)), "ahead_tokens", NO_INTEGERS)


@pytest.mark.parametrize("value", ["5", 1.5, -1, 2**32, 10**5000], ids=ranges.shown)
def test_a_number_that_a_step_does_not_carry_is_told_with_what_it_does(value: Any) -> None:
    step = StepBuilder()
    step.grow(1, 7)
    step.grow(2, value)
    with pytest.raises((TypeError, ValueError), match=r"integer from 0 to 4294967295") as raised:
        _ = step.message
    assert ("thousands" if value == 10**5000 else repr(value)) in str(raised.value).replace(
        "more than 256 bits", "thousands"
    )
