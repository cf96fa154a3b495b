"""Runs packages for writing agents, through their own interfaces. Each cell of the table in docs/gateway.md is a test.

`make test-packages` installs the packages in an environment of their own; openai is installed here, too. A package's
features are the functions of `packages/with_PACKAGE.py`. One process runs the clients one after another.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from quire.local import LocalStack

from tests.gateway.families import FAMILIES, write_family
from tests.gateway.scene import DEMO, gateway
from tests.gateway.scripted_model import scripted_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "packages"
INSTALLED = ROOT / "build" / "peers" / "packages" / "bin" / "python"
LATEST = "openai, as in the development environment"
PACKAGES = ("openai", "openai-agents", "pydantic-ai", "langchain-openai", "instructor", "litellm")
# Without LITELLM_LOCAL_MODEL_COST_MAP litellm downloads a price list.
ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"}
RUN_S = 150


def program_of(package: str) -> str:
    return f"with_{package.partition(',')[0].replace('-', '_')}"


def features_of(package: str) -> list[str]:
    tree = ast.parse((PROGRAMS / f"{program_of(package)}.py").read_text(encoding="utf-8"))
    return [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


Outcomes = dict[str, str | None]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Outcomes]]:
    """Returns a function that gives each feature's failure, or None. The demo model and the scripted model answer."""
    folder = tmp_path_factory.mktemp("clients")
    family = write_family(folder / "demo", FAMILIES["qwen3"])
    with (
        LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as held,
        LocalStack(family, worker_arguments=["--blocks", "64"]) as behind,
        scripted_model(behind.worker_address) as worker,
        gateway(folder / "gateway", "--worker", worker.address) as scripted,
    ):

        @cache
        def run(package: str) -> Outcomes:
            python = sys.executable if package == LATEST else str(INSTALLED)
            command = [python, "run.py", program_of(package), held.gateway_address, scripted.address]
            done = subprocess.run(
                command, cwd=PROGRAMS, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False
            )
            assert done.returncode == 0, done.stderr
            return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

        yield run


@pytest.mark.timeout(RUN_S + 90)
@pytest.mark.parametrize(
    ("package", "feature"), [(package, name) for package in (LATEST, *PACKAGES) for name in features_of(package)]
)
def test_a_package_works_in_its_own_way(package: str, feature: str, outcomes: Callable[[str], Outcomes]) -> None:
    if package != LATEST and not INSTALLED.exists():
        pytest.skip(f"{package} is not in build/peers/packages; make test-packages makes it")
    failure = outcomes(package)[feature]
    assert failure is None, failure


def test_the_documents_table_has_a_cell_for_each_of_these_tests() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    told = {}
    for line in text.partition("\n## Packages\n")[2].partition("\n## ")[0].splitlines():
        named = re.match(r"\| .*\(`(\w+)`\) \|", line)
        if named:
            told[named[1]] = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    features = {name for package in PACKAGES for name in features_of(package)}
    assert told == {name: ["yes" if name in features_of(package) else "-" for package in PACKAGES] for name in features}
