"""A release has one version and one name, and its workflows run the same commands as developers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import quire
import quire_allocator
import quire_cpu
import quire_gateway
import quire_kernels
import quire_worker
import yaml
from quire._distribution import NAME, how_to_install

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = ROOT / ".github" / "workflows"
PACKAGES = [quire, quire_allocator, quire_cpu, quire_gateway, quire_kernels, quire_worker]
# Only these files may name the distribution: the file with the constant, files that cannot import the constant, and a
# page that quotes pip.
NAMED_IN = {
    "client/quire/_distribution.py",
    "worker_service/quire_cpu/__init__.py",
    "worker_service/quire_kernels/__init__.py",
    "scripts/gpu_proof.py",
    "docs/first-hour.md",
}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_package_has_the_version_of_the_project(package: object) -> None:
    assert package.__version__ == PROJECT["version"]  # type: ignore[attr-defined]


def test_the_name_is_said_by_one_constant() -> None:
    assert PROJECT["name"] == NAME
    folders = ("client", "allocator_service", "gateway_service", "worker_service", "integrations", "docs", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".md", ".sh"}]
    named = {str(file.relative_to(ROOT)) for file in files if NAME in file.read_text(encoding="utf-8")}
    assert named == NAMED_IN


def test_nothing_tells_anybody_to_install_a_name_that_is_not_published() -> None:
    assert NAME not in how_to_install("cli")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    told = [file.name for file in files if re.search(rf"pip install[^\n]*{NAME}", file.read_text(encoding="utf-8"))]
    assert not told


def test_the_change_log_has_a_section_of_the_version() -> None:
    assert f"\n## {PROJECT['version']} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_continuous_integration_elsewhere_runs_all_that_is_run_here() -> None:
    here = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8")))
    workflow = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))
    python, once = workflow["jobs"]["python"]["strategy"], workflow["jobs"]["once"]["strategy"]
    there = set(python["matrix"]["target"]) | {each["target"].split()[0] for each in once["matrix"]["include"]}
    assert here <= there


def test_workflows_run_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    text = "".join(file.read_text(encoding="utf-8") for file in WORKFLOWS.glob("*.yml"))
    named = set(re.findall(r"\{target: ([a-z-]+)", text)) | set(re.findall(r"run: make ([a-z-]+)", text))
    assert named - targets == set()


def test_classifiers_name_the_pythons_that_are_tested() -> None:
    tested = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]["python"]["strategy"]
    said = [each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert said == tested["matrix"]["python"]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_as_a_file(example: Path, tmp_path: Path) -> None:
    """An example finds its imports from any folder. The examples' own tests run them completely."""
    if example.stem in {"extraction", "retrieval"}:
        pytest.skip("needs packages of agents: tests/gateway/test_package_examples.py runs it with them")
    load = f"import runpy, sys; sys.path.insert(0, {str(example.parent)!r}); runpy.run_path({str(example)!r})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", load], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_what_it_needs(example: Path) -> None:
    tree = ast.parse(example.read_text(encoding="utf-8"))
    says = ast.get_docstring(tree) or ""
    if example.stem != "stack":  # The examples of branches import this module.
        assert re.search(r"\bNeeds a clone|^    quire (?:up|allocator)", says, re.M)
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {
        name.partition(".")[0]
        for node in found
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    # `pip install '.[all]'` installs these packages, except `stack`, which is a file beside the example.
    brought = {"quire", "rich", "torch", "transformers", "stack"} | sys.stdlib_module_names
    assert roots <= brought or "    pip install " in says
