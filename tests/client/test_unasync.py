"""scripts/unasync.py generates the client's blocking half from the asyncio half, with the same methods."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import quire
import quire.session

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "unasync.py"
PAIRS = [
    (quire.AsyncClient, quire.Client),
    (quire.AsyncAllocator, quire.Allocator),
    (quire.AsyncBranch, quire.Branch),
    (quire.session.AsyncCallSession, quire.session.CallSession),
]


@pytest.fixture
def unasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the script's module, set up to work on a copy of the package."""
    spec = importlib.util.spec_from_file_location("unasync", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package = tmp_path / "client" / "quire"
    for folder in (module.PACKAGE / "_async", module.PACKAGE / "_sync"):
        shutil.copytree(folder, package / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(module.ROOT / "pyproject.toml", tmp_path)
    (package / "__init__.py").touch()  # ruff recognizes a package by this file
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PACKAGE", package)
    return module


def run(unasync: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["unasync.py", *arguments])
    unasync.main()


def test_the_committed_files_are_fresh_and_a_changed_missing_or_left_one_is_named(
    unasync: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(unasync, monkeypatch, "--check")
    blocking: Path = unasync.PACKAGE / "_sync"
    with (blocking / "client.py").open("a") as file:
        file.write("# by hand\n")
    (blocking / "streams.py").unlink()
    (blocking / "left.py").touch()
    with pytest.raises(SystemExit) as refused:
        run(unasync, monkeypatch, "--check")
    assert all(f"client/quire/_sync/{name}.py" in str(refused.value) for name in ("client", "left", "streams"))
    run(unasync, monkeypatch)
    assert not (blocking / "left.py").exists()
    run(unasync, monkeypatch, "--check")


def test_nothing_of_asyncio_is_left_in_what_is_generated(unasync: ModuleType) -> None:
    for file in (unasync.PACKAGE / "_sync").glob("*.py"):
        first, *rest = file.read_text().splitlines()
        assert first.startswith(f"# Generated from _async/{file.name} by scripts/unasync.py")
        assert not [line for line in rest if "await" in line or "async " in line or "Async" in line]


@pytest.mark.parametrize(("asyncio_class", "blocking_class"), PAIRS, ids=lambda pair: pair.__name__)
def test_both_flavors_have_the_same_methods_with_the_same_parameters(
    asyncio_class: type[Any], blocking_class: type[Any]
) -> None:
    methods = {name for name in dir(asyncio_class) if not name.startswith("_")}
    assert methods == {name for name in dir(blocking_class) if not name.startswith("_")}
    for name in methods:
        here, there = getattr(asyncio_class, name), getattr(blocking_class, name)
        if callable(here):
            assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters), name


@pytest.mark.parametrize("flavor", [quire.Allocator, quire.AsyncAllocator])
@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        ("session", {"transport": "pigeon"}, "transport must be 'stream' or 'calls', not 'pigeon'"),
        ("engine", {"transport": "pigeon"}, "transport must be 'stream' or 'calls', not 'pigeon'"),
        ("engine", {"transport": "calls", "ahead_tokens": 8}, "must be 0 or None, not 8: transport='calls' never asks"),
        ("session", {"transport": "calls", "window": 2}, "unexpected keyword argument 'window'"),
        ("session", {"keep_alive": False}, "unexpected keyword argument 'keep_alive'"),
    ],
)
async def test_an_option_that_a_transport_does_not_have_is_refused(
    flavor: type[Any], call: str, options: dict[str, Any], words: str
) -> None:
    client = flavor("127.0.0.1:1")
    spec = quire.PoolSpec.full_attention(block_count=8, block_size=4)
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(client, call)("p", spec, **options)
    closing = client.close()
    if inspect.isawaitable(closing):
        await closing


async def test_a_session_of_calls_that_is_not_open_says_so() -> None:
    spec = quire.PoolSpec.full_attention(block_count=8, block_size=4)
    with quire.Allocator("127.0.0.1:1") as client:
        session = client.session("p", spec, transport="calls")
        with pytest.raises(quire.UnavailableError, match="the session of pool p is not open"):
            session.step(quire.session.StepBuilder())
        session.close()
