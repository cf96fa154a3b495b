#!/usr/bin/env python3
"""Writes the blocking half of the client: each `_async` folder has a generated `_sync` folder next to it.

    python scripts/unasync.py           # writes; `make format` calls it
    python scripts/unasync.py --check   # names files that differ from its output; `make check` calls it

It converts a file of `_async` line by line: it drops `await` and `async`, and replaces names with their blocking form.
Then ruff sorts the imports and formats the file. Code that really differs (connections, reading a stream, leases kept
by a thread or a task) is written by hand in `quire._transport`, `quire._keep_alive` and `quire._owning`, under two
names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "client" / "quire"
ASYNC_ONLY: Final = "# asyncio only"  # marks lines that the blocking half leaves out

SUBSTITUTIONS: Final = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Exceptions from the rule that `AsyncName` becomes `Name` come first.
        (r"\bAsyncLink\b", "SyncLink"),
        (r"\bAsyncStream\b", "SyncStream"),
        (r"\bAsyncWatchStream\b", "SyncWatchStream"),
        (r"\bKeptByTask\b", "KeptByThread"),
        (r"ServiceAsyncStub\b", "ServiceStub"),
        (r"\b_?Async(?=[A-Z])", lambda match: match.group().removesuffix("Async")),
        (r"\basync_(?=\w)", ""),
        (r"\b_async\b", "_sync"),
        # Python's own asynchronous names.
        (r"\b__aenter__\b", "__enter__"),
        (r"\b__aexit__\b", "__exit__"),
        (r"\baclose\b", "close"),
        (r"\[(\w+) async for \1 in (\w+)\]", r"\2"),
        (r"\basync (?=def |with |for )", ""),
        (r"\basync with\b", "with"),
        (r"\bawait ", ""),
        (r"\bimport asyncio\b", "import threading"),
        (r"\basyncio\.Lock\b", "threading.Lock"),
        # Sentences of docstrings.
        (r"Made inside the event loop that uses it\. ", ""),
        (r"\ba task of (?=its own|the client)", "a thread of "),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a file is outdated")
    is_check: bool = parser.parse_args().check
    outdated = [each for each in _targets() if not _is_fresh(each, is_check)]
    if outdated:
        names = ", ".join(str(each.relative_to(ROOT)) for each in outdated)
        raise SystemExit(f"outdated: {names}; change the _async file, then run `make format`")


def blocking(source: str, target: Path) -> str:
    """Returns the blocking form of an asyncio module, formatted as the file `target`."""
    lines = [line for line in source.splitlines(keepends=True) if not line.rstrip().endswith(ASYNC_ONLY)]
    text = "".join(lines)
    for pattern, replacement in SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    name = f"_async/{target.name}"
    text = f"# Generated from {name} by scripts/unasync.py. Change that file, then run `make format`.\n{text}"
    return _ruff(_ruff(text, target, "check", "--quiet", "--fix", "--select", "I,F401"), target, "format")


def _targets() -> list[Path]:
    """Returns the generated files, and files in their folders that should not exist."""
    folders = sorted(PACKAGE.rglob("_async"))
    wanted = {folder.with_name("_sync") / each.name for folder in folders for each in folder.glob("*.py")}
    present = {each for folder in folders for each in folder.with_name("_sync").glob("*.py")}
    return sorted(wanted | present)


def _is_fresh(target: Path, is_check: bool) -> bool:
    """Returns whether a file equals the generated text. Without `is_check`, writes the file first."""
    source = target.parent.with_name("_async") / target.name
    if not source.exists():
        if not is_check:
            target.unlink()
        return not is_check
    text = blocking(source.read_text(), target)
    if is_check:
        return target.exists() and target.read_text() == text
    target.parent.mkdir(exist_ok=True)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return True


def _ruff(text: str, target: Path, command: str, *options: str) -> str:
    arguments = [sys.executable, "-m", "ruff", command, *options, "--stdin-filename", str(target), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    main()
