#!/usr/bin/env python3
"""Writes the values that the client shares with the allocator's core, from the core's definitions.

    python scripts/shared_values.py           # writes; `make format` calls it
    python scripts/shared_values.py --check   # names files that differ from its output; `make check` calls it

In the client, the line `MARKER` precedes each shared constant or class. A class gets the core's docstring, its
fields or members, and the body of each method that both have. Its bases and its other methods are written by hand.
Neither service imports the other's: `import quire` loads gRPC, and the client is installed without the allocator.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CORE: Final = ROOT / "allocator_service" / "quire_allocator" / "core"
CLIENT: Final = ROOT / "client" / "quire"
MARKER: Final = "# Shared with the core: scripts/shared_values.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a file is outdated")
    is_check: bool = parser.parse_args().check
    core = definitions(sorted(CORE.rglob("*.py")))
    outdated = list[str]()
    for path in sorted(CLIENT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        fresh = refreshed(text, core) if MARKER in text else text
        if fresh != text:
            outdated.append(str(path.relative_to(ROOT)))
            if not is_check:
                path.write_text(fresh, encoding="utf-8")
    if outdated and is_check:
        raise SystemExit(f"outdated: {', '.join(outdated)}; change the core's definition, then run `make format`")


def definitions(paths: list[Path]) -> dict[str, str]:
    """Returns the text of each part in these files, by the name that `parts` gives it."""
    found = dict[str, str]()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            found |= {name: "".join(lines[part]) for name, part in parts(node).items()}
    return found


def refreshed(text: str, core: dict[str, str]) -> str:
    """Returns a file of the client with the core's text in place of each shared part."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if lines[span(node, node).start - 1].rstrip() != MARKER:
            continue
        for name, part in reversed(parts(node).items()):
            if name in core:
                lines[part] = [core[name]]
            elif "." not in name:
                raise SystemExit(f"{name} is marked as shared in the client, but the core does not define it")
    return "".join(lines)


def parts(node: ast.stmt) -> dict[str, slice]:
    """Returns the lines of a constant, or of a class: its head under its name, and each method under `Class.method`."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id: span(node, node)}
    if not isinstance(node, ast.ClassDef):
        return {}
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    head = [each for each in node.body if each not in methods]
    found = {node.name: span(head[0], head[-1])} if head else {}
    return found | {f"{node.name}.{each.name}": span(each, each) for each in methods}


def span(first: ast.stmt, last: ast.stmt) -> slice:
    """Returns the lines from one statement with its decorators to the end of another."""
    decorators: list[ast.expr] = getattr(first, "decorator_list", [])
    return slice(min(each.lineno for each in (first, *decorators)) - 1, last.end_lineno)


if __name__ == "__main__":
    main()
