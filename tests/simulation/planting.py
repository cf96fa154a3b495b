"""Plants bugs by replacing a method or function of the product by one that forgets something.

`plant` registers a context manager under its name, by default in `BUGS`. The context manager plants the bug and removes
it again. The replacement gets the original function, then the arguments of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Planted = Callable[[], AbstractContextManager[Any]]
BUGS: dict[str, Planted] = {}


def plant(
    target: Any, name: str, into: dict[str, Planted] = BUGS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a bug in `target.name`. The simulation must find each bug in `BUGS`."""

    def register(broken: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def planted() -> Iterator[None]:
            original = getattr(target, name)

            def replacement(*args: Any, **kwargs: Any) -> Any:
                return broken(original, *args, **kwargs)

            with mock.patch.object(target, name, replacement):
                yield

        into[broken.__name__.strip("_").replace("_", " ")] = planted
        return broken

    return register
