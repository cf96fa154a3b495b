"""Tests which modules are loaded at run time, and which may be compiled. `.importlinter` has the import rules."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest
import quire
import quire_allocator
import quire_gateway

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "allocator_service" / "quire_allocator" / "core"

# Heavy packages, by import name. Only extras install these packages. The base installation has none of them.
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy"}
EXTRAS_OF_SERVERS_AND_CLI = {"structlog", "prometheus_client", "uvloop", "typer", "rich", "cryptography"} | {
    "fastapi",
    "httptools",
    "orjson",
    "starlette",
    "uvicorn",
}


def imported_by(statement: str, *, hidden: set[str] = frozenset()) -> set[str]:
    """Returns the top-level modules loaded after `statement` in a fresh interpreter that cannot import `hidden`."""
    script = (
        "import json, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(hidden)!r}))\n"
        f"sys.path[:] = {sys.path!r}\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name, module in sys.modules.items() if module})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of(package: object) -> list[str]:
    """Returns every module of a package, itself included, except `__main__`, which would run on import."""
    name, path = package.__name__, package.__path__  # type: ignore[attr-defined]
    found = [module.name for module in pkgutil.walk_packages(path, f"{name}.")]
    return [name, *(module for module in found if not module.endswith("__main__"))]


def test_the_client_runs_on_its_base_dependencies_alone() -> None:
    loaded = imported_by("import quire, quire.hashing, quire.errors", hidden=HEAVY | EXTRAS_OF_SERVERS_AND_CLI)
    assert "grpc" in loaded


def test_no_module_of_the_client_imports_a_model_library() -> None:
    modules = modules_of(quire)
    assert len(modules) > 10
    assert not imported_by("import " + ", ".join(modules)) & HEAVY


def test_no_module_of_the_allocator_imports_a_model_library_but_for_arrays_of_numbers() -> None:
    modules = modules_of(quire_allocator)
    assert len(modules) > 10
    assert not imported_by("import " + ", ".join(modules)) & (HEAVY - {"numpy"})


def test_no_module_of_the_gateway_imports_a_model_library() -> None:
    modules = modules_of(quire_gateway)
    assert len(modules) > 10
    assert not imported_by("import " + ", ".join(modules)) & HEAVY


def test_the_help_of_the_worker_does_not_wait_for_a_model_library() -> None:
    assert not imported_by("import quire_worker.process.options") & HEAVY
    statement = "from quire.cli.app import app\ntry: app(['worker', '--help'])\nexcept SystemExit: pass"
    loaded = imported_by(statement)
    assert "argparse" in loaded
    assert not loaded & HEAVY


def test_the_core_uses_the_standard_library_and_arrays_where_readers_count_blocks() -> None:
    """`.importlinter` says what the core must not import; this test checks that it imports nothing else."""
    foreign = {
        str(path.relative_to(CORE)): found
        for path in CORE.rglob("*.py")
        if (found := imports_in(path) - sys.stdlib_module_names - {"quire_allocator"})
    }
    assert foreign == {"block_states.py": {"numpy"}, "readers/usage.py": {"numpy"}}


def imports_in(path: Path) -> set[str]:
    """Returns the top-level names of all imports in a file, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_core_loads_no_wire_and_no_server() -> None:
    loaded = imported_by("import quire_allocator.core.ownership.directory, quire_allocator.core.pool")
    assert not loaded & {"grpc", "google", "quire", "asyncio", "structlog", "prometheus_client"}


def test_no_heavy_library_is_a_base_dependency() -> None:
    try:
        requirements = importlib.metadata.requires("quire-kv") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution is not installed here")
    base = {
        requirement.split(">")[0].split("<")[0].strip() for requirement in requirements if "extra" not in requirement
    }
    assert not base & (HEAVY | EXTRAS_OF_SERVERS_AND_CLI)


def compiled_modules() -> dict[str, Path]:
    """Returns the modules that `pyproject.toml` lists for compilation, by name."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = config["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    included = {path for pattern in hook["include"] for path in ROOT.glob(pattern)}
    paths = included - {path for pattern in hook["exclude"] for path in ROOT.glob(pattern)}
    folder = ROOT / "allocator_service"
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(paths)}


@pytest.mark.parametrize("package", ["quire", "quire_cpu", "quire_gateway", "quire_kernels", "quire_worker"])
def test_no_module_is_in_a_circle_also_of_imports_for_types(package: str) -> None:
    """`.importlinter` forbids cycles at run time; this test also forbids cycles of imports for types."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imported) > 5
    graphlib.TopologicalSorter(imported).prepare()  # raises a CycleError that names the cycle


def test_no_compiled_class_derives_from_one_that_is_not() -> None:
    """Reading a missing attribute of such an object raises SystemError in some Python releases, such as 3.11.2."""
    paths = compiled_modules()
    # These base classes are safe although they are not compiled.
    harmless = {"ABC", "Enum", "Generic", "IntEnum", "NamedTuple", "Protocol"}
    found = 0
    for module, path in paths.items():
        tree = ast.parse(path.read_text())
        local = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in paths)
        local |= {alias.name for node in imports for alias in node.names}
        for node in ast.walk(tree):
            bases = [ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", ())]
            foreign = [base for base in bases if base.split(".")[-1] not in local | harmless]
            assert not foreign, f"{module}: {getattr(node, 'name', '')} derives from {foreign}"
            found += len(bases)
    assert found > 20
