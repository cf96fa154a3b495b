"""Numbers beyond the range of a public parameter are refused with name, value and range, before anything is sent.

The tests read the parameters from the signatures, so they cover new ones. `test_timeouts.py` tests times.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import Allocator, Branch, Client, GroupSpec, PoolSpec, Quota, SamplingParams, hashing, planning
from quire._numbers import shown
from quire._transport import ranges
from quire._transport.messages import pool_spec_message
from quire.engine import Engine
from quire.errors import InvalidArgumentError
from quire.planning import LayerSpec
from quire.protocol.limits import PRIORITY_MAX
from quire.session import StepBuilder
from quire.types import GroupKind
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb
from quire_worker.sampling.params import ParameterError
from quire_worker.sampling.params import SamplingParams as WorkerParams

from tests.client.servers import ScriptedServer, allocator_process, scripted_server, two_samples

CONFIG = Path(__file__).parent / "configs" / "llama-3-70b.json"
SPEC = PoolSpec.full_attention(block_count=8, block_size=4, cache_layout="l", model_fingerprint=b"f" * 32)
NO_INTEGERS: list[Any] = ["5", True, 1.5, math.nan, math.inf, [1], -(10**5000), 10**5000, 2**64, -(2**63) - 1]
NO_NUMBERS: list[Any] = ["5", True, math.nan, math.inf, -math.inf, [1], 10**5000, 1e300]
# Columns of operations that a step does not send if they hold only zeros.
LEFT_OUT = ("keep_ms", "keep_token_count", "prompt_token_count", "priority", "defer_token_count")
# Valid arguments of the calls below, by name. Each test case replaces one number.
GIVEN: dict[str, Any] = {
    "prompt": "p", "many": ["p"], "conversation": [{"role": "user", "content": "u"}], "pool": "p", "spec": SPEC,
    "sequence_id": 2, "token_count": 1, "parent_id": 1, "child_id": 2, "namespace": "n", "digests": b"d" * 32,
    "model": "m", "prompt_token_count": 1,
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
    """Returns the numeric parameters of a function, and whether each is an integer."""
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
        assert shown(value) in said, (name, value, said)
        assert "proto" not in said.lower(), said
        assert "range" not in said, said  # "range" is protobuf's wording


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


@pytest.mark.parametrize("bias", ["1", True, math.nan, 101, -(10**5000)], ids=shown)
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


@pytest.mark.parametrize("value", ["5", 1.5, -1, 2**32, 10**5000], ids=shown)
def test_a_number_that_a_step_does_not_carry_is_told_with_what_it_does(value: Any) -> None:
    step = StepBuilder()
    step.grow(1, 7)
    step.grow(2, value)
    with pytest.raises((TypeError, ValueError), match=r"integer from 0 to 4294967295") as raised:
        _ = step.message
    assert shown(value) in str(raised.value)


@pytest.mark.parametrize("value", [*NO_INTEGERS[:-2], 2**64, False], ids=shown)
@pytest.mark.parametrize(
    ("method", "name"),
    [(each, name) for each, them in methods_of(StepBuilder, "check_ids", "names_no_newer").items() for name in them],
)
def test_a_number_of_an_operation_is_refused_with_the_name_of_its_parameter(method: str, name: str, value: Any) -> None:
    if value is False and name in LEFT_OUT:
        return  # `False` counts as 0, and a column of zeros is not sent.
    step = StepBuilder()
    beside = {"namespace": "n", "digests": b"d" * 64} if method == "drop" else {}
    call = call_on(step.grow(1, 7), method)
    with pytest.raises((TypeError, ValueError)) as raised:
        _ = call(**beside, **{name: value}).message
    said = str(raised.value)
    assert said.startswith(f"{name} must be an integer from {-PRIORITY_MAX if name == 'priority' else 0} to "), said
    assert shown(value) in said


@pytest.mark.parametrize("priority", [-PRIORITY_MAX - 1, PRIORITY_MAX + 1])
def test_a_step_has_no_priority_beyond_the_scale(priority: int) -> None:
    with pytest.raises(ValueError, match=f"priority must be an integer from -10 to 10, not {priority}"):
        _ = StepBuilder().allocate(1, 1, priority=priority).message
    packed = StepBuilder().allocate(1, 1, priority=-PRIORITY_MAX).allocate(2, 1, priority=PRIORITY_MAX).message
    assert list(pb.Step.FromString(packed.SerializeToString()).grows.priorities) == [-10, 10]


LAYERS = (LayerSpec(0, GroupKind.FULL_ATTENTION, 2, 64),)
PURE: dict[str, Any] = {
    "layers": LAYERS, "layout": planning.plan_layout(LAYERS), "memory_bytes": 1 << 30, "block_count": 100,
    "token_count": 64, "retention": planning.Retention.TAIL, "config": json.loads(CONFIG.read_text()),
    "root": bytes(32), "tokens": [1] * 32, "block_size": 16, "items": [], "token_count_max": 1_000, "layer": 0,
    "kind": GroupKind.FULL_ATTENTION, "content_id": b"c", "first_token": 0,
}  # fmt: skip
BESIDE = {"LayerSpec": {"kv_head_count": 2, "head_dim": 64}, "MultimodalItem": {"token_count": 1}}
NO_CALLERS = {
    "Cost",
    "Family",
    "Group",
    "Layout",
    "ModelCache",
    "PageSlice",
    "ConfigError",
    "Retention",
}  # Callers make no objects of these classes; only the planner does.
FUNCTIONS = {
    name: value
    for module in (planning, hashing)
    for name, value in vars(module).items()
    if getattr(value, "__module__", "").startswith(module.__name__) and name[0] != "_" and name not in NO_CALLERS
}
FUNCTIONS |= {name: getattr(PURE["layout"], name) for name in methods_of(planning.Layout)}


@pytest.mark.parametrize(
    ("function", "name", "is_whole"),
    [(each, name, whole) for each, call in FUNCTIONS.items() for name, whole in numbers_of(call).items()],
)
def test_a_number_that_planner_or_digests_do_not_take_is_refused(function: str, name: str, is_whole: bool) -> None:
    call = FUNCTIONS[function]
    required = {each.name for each in inspect.signature(call).parameters.values() if each.default is each.empty}
    given = {key: value for key, value in PURE.items() if key in required} | BESIDE.get(function, {})
    refuse(lambda **values: call(**given | values), name, [*(NO_INTEGERS if is_whole else NO_NUMBERS), -1])


@pytest.mark.parametrize("name", ["token_count_max", "defer_token_count"])
def test_a_number_that_admit_does_not_take_is_refused_and_the_next_prompt_is_admitted(
    engine: Engine, name: str
) -> None:
    refuse(lambda **values: engine.admit([1, 2, 3], **values), name, [*NO_INTEGERS, -1, 2**32])
    assert engine.admit([1, 2, 3], **{name: 2**32 - 1}).tokens == [1, 2, 3]


def test_a_priority_that_is_not_on_the_scale_is_refused_and_the_next_prompt_is_admitted(engine: Engine) -> None:
    refuse(lambda **values: engine.admit([1, 2, 3], **values), "priority", [*NO_INTEGERS, -11, 11, 2**32])
    for priority in (-10, 10):
        assert engine.admit([1, 2, 3], priority=priority).tokens == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": each} for each in ("5", b"5555", 5, [1.5], ["5"], [2**31])] + [{"namespace": 5}, {"root": b"r"}],
)
def test_a_prompt_that_is_none_is_refused_and_the_next_is_admitted(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        engine.admit(**{"tokens": [1, 2, 3], **wrong})
    assert engine.admit([1, 2, 3]).tokens == [1, 2, 3]


def test_a_number_that_a_sequence_does_not_take_changes_nothing(engine: Engine) -> None:
    sequence = engine.admit([1, 2, 3])
    refuse(sequence.append, "token", NO_INTEGERS)
    refuse(sequence.advance, "token_count", NO_INTEGERS)
    assert (sequence.tokens, sequence.computed) == ([1, 2, 3], 0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with allocator_process(tmp_path) as process, Allocator(process.address) as client, client.engine("p", SPEC) as made:
        yield made
