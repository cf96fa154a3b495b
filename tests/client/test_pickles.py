"""Every public exception and value can be pickled, copied and printed, because engines run in process pools."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import quire
import quire.session
from quire import QuireError, Reason, events, types, views
from quire._reprs import ShortRepr
from quire.engine import NotAdmittedError
from quire.engine.sequence import Refusal
from quire.events import SnapshotEnd
from quire.mirror import PrefixMirror
from quire.protocol.outcomes import Result
from quire.session import StepBuilder

MADE_BY: dict[type[Exception], Callable[[], Exception]] = {
    NotAdmittedError: lambda: NotAdmittedError(Refusal(Result.NO_SPACE, 7, None, 0)),
}


def exceptions() -> list[type[Exception]]:
    """Returns every exception class of the client, from all its modules."""
    found: dict[str, type[Exception]] = {}
    for module in pkgutil.walk_packages(quire.__path__, "quire."):
        if module.name.startswith(("quire.v1", "quire.cli", "quire._serving")) or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("quire"):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return list(found.values())


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_every_exception_arrives_as_it_was(kind: type[Exception], again: Callable[[Any], Any]) -> None:
    error = MADE_BY.get(kind, lambda: kind("what is wrong"))()
    if isinstance(error, QuireError):
        error.reason, error.request_id, error.retry_after_s, error.field = Reason.LIMIT, "request", 1.5, "field"
    error.add_note("and a note")
    arrived = again(error)
    assert type(arrived) is kind
    assert (str(arrived), repr(arrived), vars(arrived)) == (str(error), repr(error), vars(error))


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_whoever_catches_errors_of_quire_catches_every_one_that_is_public(kind: type[Exception]) -> None:
    module = kind.__module__.removeprefix("quire.")
    is_public = (kind.__name__, module) not in {("EndedError", "session.call"), ("ConfigError", "planning.fields")}
    assert issubclass(kind, QuireError) is is_public


def repr_kind(content: Any) -> str:
    return f"{type(content).__name__}-{len(content)}"


def values() -> list[Any]:
    """Returns an instance of every public value class, with every field set."""
    made: list[Any] = []
    modules = (quire, quire.errors, events, quire.sampling, quire.session, quire.types, views)
    public = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_")}
    for _, kind in sorted((name, value) for name, value in public.items() if isinstance(value, type)):
        if dataclasses.is_dataclass(kind):
            value = object.__new__(kind)  # type: ignore[call-overload]
            for number, field in enumerate(dataclasses.fields(kind)):
                object.__setattr__(value, field.name, number)
            made.append(value)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            made.append(kind(*range(len(kind._fields))))  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_every_value_arrives_as_it_was(value: Any, again: Callable[[Any], Any]) -> None:
    arrived = again(value)
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)


def test_what_is_large_is_not_printed() -> None:
    stored = events.BlocksStored("p", b"s", 1, 2, (0,), "", b"", (bytes(32),) * 4096, 16, 0)
    removed = events.BlocksRemoved("p", b"s", 1, 2, (0,), "", (bytes(32),) * 4096, 0)
    status = next(value for value in values() if isinstance(value, types.WorkerStatus))
    for value in (stored, removed, status):
        assert len(repr(value)) <= 200


LONG = [kind for kind in {type(value) for value in values()} if issubclass(kind, ShortRepr)]


@pytest.mark.parametrize("kind", sorted(LONG, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("content", [bytes(5000), ("x" * 50,) * 5000, "word " * 5000, ("y" * 5000,)], ids=repr_kind)
def test_a_repr_is_one_line_of_at_most_200_characters(kind: type[Any], content: Any) -> None:
    value = object.__new__(kind)
    for each in dataclasses.fields(kind):
        object.__setattr__(value, each.name, content)
    assert len(repr(value)) <= 200
    assert "\n" not in repr(value)


def test_a_repr_says_what_differs_from_the_defaults() -> None:
    assert repr(quire.SamplingParams(n=2, stop=("a",))) == "SamplingParams(n=2, stop=('a',))"
    usage = quire.Usage(7, 0, 3, 1, 1, 0)
    sample = quire.Sample("a text\nof two lines", tuple(range(3_000)), quire.FinishReason.LENGTH)
    shown = repr(quire.Generation((sample,), usage, "id"))
    assert shown.startswith(
        r"Generation(samples=(Sample(text='a text\nof two lines', token_ids=<3,000 items>, finish_reason="
    )


def test_a_mirror_and_a_step_are_pickled() -> None:
    spec = quire.PoolSpec.full_attention(block_count=8, block_size=16)
    mirror = PrefixMirror(spec)
    mirror.apply(SnapshotEnd("p", b"s", 3, 0))
    again = pickle.loads(pickle.dumps(mirror))
    assert (again.is_exact, again.session_id) == (True, b"s")
    step = StepBuilder()
    step.free(3)
    assert pickle.loads(pickle.dumps(step)).message == step.message
