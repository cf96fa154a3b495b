"""Limits that keep documents readable: sizes of lines, pages, decisions and commit subjects."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("models", "build") for part in path.relative_to(ROOT).parts)
)
CHARACTERS_MAX = 160  # limit per line, outside tables, code and link targets
LINES_MAX = {"README.md": 110, "ARCHITECTURE.md": 120}
DECISION_LINES_MAX = 40
# The words of docs/ as `wc -w` counts them, without tables, decisions and reference pages.
PAGES_WORDS_MAX = 20_000
SUBJECT_CHARACTERS_MAX = 72
SUBJECTS_AFTER = "7e723954ef84b51f4dc586a74a69bc7546cd894d"  # Only later commits must have short subjects.


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Yields a document's numbered lines without code and tables. Links are reduced to their visible text."""
    is_code = False
    for number, line in enumerate(markdown.splitlines(), 1):
        is_fence = line.lstrip(" >").startswith("```")
        is_code ^= is_fence
        if not (is_code or is_fence or line.startswith(("|", "    ", ">     "))):
            yield number, re.sub(r"\]\([^)\s]*\)", "]", line)


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_no_line_of_a_document_is_long(path: Path) -> None:
    lines = sentences(path.read_text(encoding="utf-8"))
    assert not {number: line for number, line in lines if len(line) > CHARACTERS_MAX}


def test_a_long_line_would_be_noticed_and_code_tables_and_targets_of_links_are_none() -> None:
    code = "```sh\nmake\n```\n\n    make\n"
    assert list(sentences(f"# A\n{code}| a | b |\n- [b](c.md#d) e")) == [(1, "# A"), (5, ""), (8, "- [b] e")]


@pytest.mark.parametrize("name", LINES_MAX)
def test_the_first_documents_are_short(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").count("\n") <= LINES_MAX[name]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=name_of)
def test_decisions_are_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= DECISION_LINES_MAX


def test_the_pages_of_the_documents_do_not_grow_again() -> None:
    looked_up = {"alerts", "bugs", "metrics"}  # Readers look up single rows of these pages.
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"]
    pages = [path for path in pages if path.stem not in looked_up]
    assert len(pages) > 20
    lines = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= PAGES_WORDS_MAX


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_subjects_of_commits_are_short() -> None:
    if shutil.which("git") is None or git("cat-file", "-e", SUBJECTS_AFTER).returncode:
        pytest.skip("this copy has no history, or not that far back")
    log = git("log", "--no-merges", "--format=%s", f"{SUBJECTS_AFTER}..HEAD")
    assert log.returncode == 0, log.stderr
    assert not [subject for subject in log.stdout.splitlines() if len(subject) > SUBJECT_CHARACTERS_MAX]
