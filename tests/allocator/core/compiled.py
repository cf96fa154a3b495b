"""Helps tests that also run on the compiled core: tries an operation without copying native objects."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import TypeVar

from quire_allocator.core import pool

IS_COMPILED = not str(pool.__file__).endswith(".py")
T = TypeVar("T")


def what_if(thing: T, look: Callable[[T], list[int]]) -> list[int]:
    """Returns the result of `look`, which may change `thing`; every change is undone.

    Objects of extension modules cannot be copied, so a forked process looks at the originals.
    """
    if not IS_COMPILED:
        return look(copy.deepcopy(thing))
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(look(thing)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    found: list[int] = json.loads(answer)
    return found
