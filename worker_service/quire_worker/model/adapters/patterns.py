"""Regular expressions of an adapter's author, matched in a process that may be ended.

Matching may take minutes, and holds the interpreter's lock.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

MATCH_S_MAX: Final = 10
_PROGRAM: Final = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    "print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))\n"
)


class PatternError(ValueError):
    """A text is not a regular expression, or matching it takes too long."""


def fully_matched(pattern: str, names: Iterable[str]) -> set[str]:
    """Returns the names that a regular expression matches as a whole.

    Raises:
        PatternError: the pattern is invalid, or matching takes more than `MATCH_S_MAX` seconds.
    """
    command = [sys.executable, "-I", "-c", _PROGRAM]
    given = json.dumps([pattern, [*names]])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=MATCH_S_MAX, check=True)
    except subprocess.TimeoutExpired:
        raise PatternError(f"takes more than {MATCH_S_MAX} s to match") from None
    except subprocess.CalledProcessError:
        raise PatternError("is not a regular expression") from None
    return set(json.loads(done.stdout))
