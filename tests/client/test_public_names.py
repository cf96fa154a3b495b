"""Few public names are at the root and the others in their modules. Every type in a public signature is public."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import quire
import quire.local
import quire.session
import quire.streams
from quire import engine, errors, events, hashing, mirror, sampling, session, streams, tls, types, views

MODULES = (quire, engine, errors, events, hashing, quire.local, mirror, sampling, session, streams, tls, types, views)
PUBLIC = {
    id(value) for module in MODULES for name, value in vars(module).items() if not name.startswith("_")
}  # The set has identities, because unions and mappings cannot be hashed.
CLASSES = [
    *(getattr(quire, name) for name in quire.__all__ if inspect.isclass(getattr(quire, name))),
    *(getattr(engine, name) for name in engine.__all__),
    *(getattr(session, name) for name in session.__all__ if inspect.isclass(getattr(session, name))),
    *(getattr(streams, name) for name in streams.__all__),
]
# Not public. An engine also reads the owner's state and the protocol's messages through `AsyncSession`.
BELOW = {"quire.session.ledger.Ledger"}


def named(hint: Any) -> Iterator[type[Any]]:
    """Yields every class in an annotation."""
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for each in typing.get_args(hint):
        yield from named(each)


def methods(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers(kind):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, value.fget
        elif inspect.isfunction(value) or inspect.ismethod(value):
            yield name, value


def test_the_root_has_few_names() -> None:
    assert len(quire.__all__) <= 33
    assert set(quire.__all__) <= set(dir(quire))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_every_type_that_a_public_method_names_is_public(kind: type[Any]) -> None:
    for name, method in methods(kind):
        if not method.__module__.startswith("quire."):
            continue
        for each in [each for hint in typing.get_type_hints(method).values() for each in named(hint)]:
            full = f"{each.__module__}.{each.__qualname__}"
            if each.__module__.startswith("quire.") and not full.startswith("quire.v1.") and full not in BELOW:
                assert id(each) in PUBLIC, f"{kind.__name__}.{name} names {full}"
