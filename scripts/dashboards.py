"""Writes the dashboards of deploy/grafana/dashboards/ from their descriptions in scripts/boards/.

    python scripts/dashboards.py          write them
    python scripts/dashboards.py --check  fail if a file differs from its description

grafana-foundation-sdk makes the JSON, so that its fields and values are right for Grafana 11.6.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `scripts.boards` is found when this file is run by its path

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402

from scripts.boards.cache import CACHE  # noqa: E402
from scripts.boards.fleet import FLEET  # noqa: E402
from scripts.boards.now import NOW  # noqa: E402
from scripts.boards.parts import Board, Note, Row, build  # noqa: E402
from scripts.boards.recovery import RECOVERY  # noqa: E402
from scripts.boards.requests import REQUESTS  # noqa: E402
from scripts.boards.tenants import TENANTS  # noqa: E402

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
ALERTS = ROOT / "docs" / "alerts.md"


def runbooks() -> Board:
    """Returns a dashboard with the sections of docs/alerts.md, because Grafana cannot show files of a clone."""
    sections = re.split(r"^## ", ALERTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    notes = []
    for section in sections:
        title, _, content = section.partition("\n")
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", content).strip()
        lines = plain.count("\n")
        notes.append(Note(title, plain, width=12, height=max(8, 2 + lines)))
    rows = [Row("What to do about each alert: docs/alerts.md", notes)]
    return Board(
        "runbooks", "Quire: Runbooks", "What to do about each alert; the text is that of docs/alerts.md.", rows
    )


def written() -> dict[str, str]:
    """Returns the text of each file by its name."""
    boards = [NOW, TENANTS, CACHE, REQUESTS, RECOVERY, FLEET, runbooks()]
    return {f"{board.name}.json": json.dumps(build(board), cls=JSONEncoder, indent=1) + "\n" for board in boards}


def main() -> None:
    """Writes the files, or compares them with the descriptions."""
    parser = argparse.ArgumentParser(description="Write the dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is outdated")
    is_check = parser.parse_args().check
    texts = written()
    if not is_check:
        for path in FOLDER.glob("*.json"):
            path.unlink()
        for name, text in texts.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    different = sorted(name for name in texts.keys() | there.keys() if texts.get(name) != there.get(name))
    if different:
        sys.exit(f"{', '.join(different)} differ from scripts/boards/: run python scripts/dashboards.py")


if __name__ == "__main__":
    main()
