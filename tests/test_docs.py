"""Checks documents against the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.page_blocks import HOW, REASONS, blocks_of, pages

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "docs" / "model"
FOLDERS = (
    "client",
    "integrations",
    "allocator_service",
    "gateway_service",
    "worker_service",
    "tests",
    "benchmarks",
    "examples",
    "conformance",
    "scripts",
    "docs",
)
SOURCES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
OF_OTHERS = {"_call.py", "mla/_batch_mla/_wrapper.py"}  # files of gRPC and FlashInfer, which are not in this repository
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "benchmarks", "conformance", "examples", "integrations", "tests")
        for path in (ROOT / folder).rglob("*.md")
    ),
]


def requirement_names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    return names - {project["name"]}


def test_every_dependency_is_named_with_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    assert not [name for name in requirement_names() if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def test_every_dependency_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert requirement_names() <= pinned


def test_no_transformers_beyond_the_tested_minor_release_is_allowed() -> None:
    """Minor releases rename arguments of models: 5.24 has `cache` for `past_key_values`."""
    (tested,) = re.findall(r"^transformers==5\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f'"transformers>=5.17,<5.{int(tested) + 1}"' in (ROOT / "pyproject.toml").read_text()


def test_every_variable_that_a_program_reads_is_on_the_page_of_operating() -> None:
    folders = ("client", "allocator_service", "gateway_service", "worker_service")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {
        name for path in files for name in re.findall(r"\"(QUIRE_[A-Z_]*[A-Z])\"", path.read_text(encoding="utf-8"))
    }
    internal = {"QUIRE_RANKS_RENDEZVOUS"}  # A worker sets this variable for the ranks that it starts.
    table = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8").split("\n## Variables\n")[1].split("\n## ")[0]
    assert {"QUIRE_ALLOCATOR", "QUIRE_CACHE"} <= read
    assert read - internal - set(re.findall(r"`(QUIRE_[A-Z_]+)`", table)) == set()


def test_every_decision_has_a_number_of_its_own_and_says_it() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [int(record.name[:4]) for record in records]
    assert len(set(numbers)) == len(numbers)
    for number, record in zip(numbers, records, strict=True):
        assert record.read_text(encoding="utf-8").startswith(f"# {number}. ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r'\]\(([^)#:"\s]+)(?: "[^"]*")?\)', document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def anchors_of(document: Path) -> set[str]:
    """Returns the anchors of a document: its headings as GitHub spells them after `#` in a link."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_document_lead_to_a_heading(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
        other = document.parent / target if target else document
        assert anchor in anchors_of(other), f"{document.name} links to {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_file_that_is_named_exists(document: Path) -> None:
    """A path such as `core/pool.py` matches the end of a file's path, so documents may omit obvious folders."""
    text = document.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.py)`", text) if not name.startswith("vllm/")}
    assert not [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in SOURCES)]


def test_every_python_file_that_a_package_names_is_its_own_or_the_clients() -> None:
    """After a file is moved or renamed, comments may still have its old name."""
    missing = []
    for folder in ("/client/", "/allocator_service/", "/gateway_service/", "/worker_service/"):
        near = [path for path in SOURCES if path.startswith((folder, "/client/"))]
        for source in (path for path in SOURCES if path.startswith(folder)):
            for name in re.findall(r"`([\w/]+\.py)`", (ROOT / source[1:]).read_text(encoding="utf-8")):
                known = f"/{name}" in SOURCES or any(path.endswith(f"/{name}") for path in near)
                if not known and name not in OF_OTHERS:
                    missing.append((source, name))
    assert not missing


def test_every_method_that_the_record_of_the_model_names_exists() -> None:
    code = "".join(
        (ROOT / path[1:]).read_text(encoding="utf-8") for path in SOURCES if path.startswith(("/client/", "/allocator"))
    )
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", (MODEL / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 12
    for owner, method in named:
        bodies = re.findall(rf"^class {owner}\b.*?(?=^class |\Z)", code, re.MULTILINE | re.DOTALL)
        assert any(f"    def {method}(" in body for body in bodies), f"{owner}.{method}"


def test_every_test_named_in_the_bug_record_exists() -> None:
    rows = re.findall(r"^\| (?!symptom|---).*", (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 200
    for row in rows:
        symptom, cause, test = row.strip("| ").replace("\\|", "").split(" | ")
        assert symptom.endswith("."), row
        assert cause.endswith("."), row
        assert test, row
        for path, names in re.findall(r'\]\(\.\./([\w/]+\.py)(?: "([^"]*)")?\)', test):
            functions = re.findall(r"def (test_\w+)\(", (ROOT / path).read_text(encoding="utf-8"))
            assert set(names.split(", ")) - {""} <= set(functions), row


def test_the_makefile_lists_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert {"help", "dev", "demo", "test", "check", "proto", "bench", "up", "down", "test-compose"} <= documented


def test_the_record_of_the_model_counts_the_mistakes_that_are_planted_in_it() -> None:
    listed = re.findall(r"^#define \w+ +\d+ +/\* rule \d+: .* \*/$", (MODEL / "session.pml").read_text(), re.MULTILINE)
    assert f"Each of the {len(listed)} mistakes" in (MODEL / "README.md").read_text(encoding="utf-8")


def test_every_block_of_a_document_is_run_by_a_test_or_says_why_not() -> None:
    blocks = [block for page in pages() for block in blocks_of(page)]
    assert len(blocks) > 60
    assert not [(block.page, block.first) for block in blocks if block.key is None]
    assert {block.key for block in blocks} == HOW.keys(), "no entry is left over"
    assert not [how for how in HOW.values() if how not in REASONS and not (ROOT / how).is_file()]
