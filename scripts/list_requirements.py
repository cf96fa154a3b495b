"""Prints the requirements of the distribution and some of its extras, one a line.

    python scripts/list_requirements.py allocator cli > requirements.txt

The images install this list in a separate layer, so a change of the source does not download torch again.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Returns the requirements of the base distribution, then the requirements of each extra, without repeats.

    Raises:
        KeyError: the distribution does not have the extra.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines.extend(project["optional-dependencies"][extra])
    return list(dict.fromkeys(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the requirements of the distribution and some extras.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml, for example: allocator cli")
    print("\n".join(requirements(parser.parse_args().extras)))


if __name__ == "__main__":
    main()
