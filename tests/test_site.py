"""Tests the documentation site: its sources, its links, and its pages on a phone. `make docs` builds the whole site."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from scripts import site as build

BROWSER = shutil.which("chromium")
QUESTIONS = 15  # The page must answer at least this many questions.


def test_lists_and_tables_behind_a_paragraph_get_the_empty_line_that_they_need_and_code_gets_none() -> None:
    text = "Such as:\n- one\n  more\n- two\n1. three\n\n```\na\n- b\n```\ntable:\n| a |\n| --- |\n"
    read = "Such as:\n\n- one\n  more\n- two\n1. three\n\n```\na\n- b\n```\ntable:\n\n| a |\n| --- |\n"
    assert build.as_markdown_reads_it(text) == read
    assert build.as_markdown_reads_it(read) == read


def test_every_page_of_the_documents_and_what_they_link_to_is_on_the_site(tmp_path: Path) -> None:
    build.stage(tmp_path / "source")
    staged = {str(path.relative_to(tmp_path / "source")) for path in (tmp_path / "source").rglob("*") if path.is_file()}
    assert {str(path.relative_to(build.ROOT)) for path in (build.ROOT / "docs").glob("*.md")} <= staged
    assert {"README.md", "ARCHITECTURE.md", "benchmarks/figures.md", "protos/quire/v1/files.md"} <= staged
    commands = (tmp_path / "source" / "reference" / "commands.md").read_text()
    for section in ("## quire pool list\n", "## quire-allocator\n", "## quire-gateway\n", "## quire-worker\n"):
        assert section in commands
    assert "`--kv-memory`" in commands
    modules = (tmp_path / "source" / "reference" / "modules.md").read_text()
    assert {"quire.engine", "quire.session", "quire.mirror", "quire.local"} <= set(
        re.findall(r"^::: (.+)", modules, re.M)
    )


def test_the_questions_of_a_first_day_have_a_row_with_a_page_each() -> None:
    rows = [line for line in (build.ROOT / "docs" / "faq.md").read_text().splitlines() if "?" in line.partition("|")[2]]
    assert len(rows) >= QUESTIONS
    assert [row for row in rows if "](" not in row.rsplit("|", 2)[1]] == []


def test_each_question_is_a_section_of_its_own_that_the_search_puts_before_records(tmp_path: Path) -> None:
    build.stage(tmp_path)
    text = (tmp_path / "docs" / "faq.md").read_text()
    table = (build.ROOT / "docs" / "faq.md").read_text()
    assert text.count("\n## ") == table.count("\n| ") - 2
    assert "\n\n## Which quantizations?\n\ntorchao's" in text
    assert "\n|" not in text
    assert "[client](../reference/client.md)" in text

    def factor(name: str) -> float:
        return float(re.findall(r"boost: ([\d.]+)\n---\n", (tmp_path / name).read_text())[0])

    assert factor("docs/faq.md") > 1 > factor("reference/client.md") > factor("docs/decisions/README.md")


def page(site: Path, name: str, body: str) -> None:
    (site / name).write_text(f"<!doctype html><html><body>{body}</body></html>")


def test_a_link_to_no_file_and_one_to_no_anchor_are_dead(tmp_path: Path) -> None:
    page(
        tmp_path, "a.html", '<h1 id="top"></h1><a href="b.html#there"></a><a href="#top"></a><a href="b.html#not"></a>'
    )
    page(tmp_path, "b.html", '<h1 id="there"></h1><img src="none.svg"><a href="https://example.com/x"></a>')
    assert sorted(build.dead_links(tmp_path)) == ["a.html: b.html#not", "b.html: none.svg"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.timeout(600)
def test_a_page_that_a_phone_has_to_scroll_sideways_is_found(tmp_path: Path) -> None:
    page(tmp_path, "narrow.html", "<p>one</p>")
    page(tmp_path, "wide.html", '<div style="width: 900px">two</div>')
    assert BROWSER is not None
    assert build.wide_pages(tmp_path, BROWSER) == ["wide.html"]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning_and_has_no_dead_link(tmp_path: Path) -> None:
    assert build.build(tmp_path / "source", tmp_path / "site") == []
    client = (tmp_path / "site" / "reference" / "client.html").read_text()
    assert 'id="quire.AsyncClient' in client or 'id="quire.Client' in client
    modules = (tmp_path / "site" / "reference" / "modules.html").read_text()
    assert all(f'id="quire.{name}"' in modules for name in ("engine.AsyncEngine", "mirror.PrefixMirror"))
    found = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    revoking = [entry for entry in found if entry["location"] == "docs/faq.html#how-do-i-revoke-a-key"]
    assert [entry["boost"] for entry in revoking] == [build.SEARCH_FACTORS[build.QUESTIONS]]
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(https?:[^">]*)', client)
    assert loaded == [], "nothing is fetched from elsewhere"
