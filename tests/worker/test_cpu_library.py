"""The library of CPU kernels: found, made, refused."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cpu import build, library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, for a library that is not optimised, which compiles in a few seconds."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS[:1], "-O0", *build.FLAGS[2:]))
    library.load.cache_clear()
    yield tmp_path / "cache"
    library.load.cache_clear()


def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_a_compiler_makes_the_library_once_and_it_is_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    made = library.load()
    assert isinstance(made, library.Library)
    assert made.instruction_sets[-1] == "baseline"
    assert [path.name for path in cache.iterdir()] == [build.library_name()]
    without_a_compiler(monkeypatch)
    library.load.cache_clear()
    found = library.load()
    assert isinstance(found, library.Library)
    assert found.path == made.path


def test_without_a_compiler_there_is_no_library_and_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_compiler(monkeypatch)
    assert "no C++ compiler" in str(library.load())


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: shutil.which("false"))
    assert "it ended with 1" in str(library.load())
    assert list(cache.iterdir()) == []


def test_a_cache_that_others_may_write_to_is_not_loaded_from(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert "others than this user may write" in str(library.load())


def test_other_sources_or_flags_are_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.library_name() != before


def test_it_is_switched_off_by_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU", "0")
    assert "QUIRE_CPU=0" in str(library.load())


def test_the_structures_are_as_large_as_the_header_says() -> None:
    """ctypes and the C compiler pad alike; a field that one of them lacks would move all that follow it."""
    header = (build.SOURCES / "quire_cpu.h").read_text(encoding="utf-8")
    from quire_cpu import interface

    for structure in [*interface.CALLS.values(), interface.Packed, interface.Layer]:
        title = f"Quire{structure.__name__}"
        body = header.split(f"struct {title} {{", 1)[1].split("};", 1)[0]
        fields = [
            name.split()[-1].lstrip("*")
            for line in body.splitlines()
            for declaration in line.split("//")[0].split(";")
            for name in declaration.split(",")
            if name.strip()
        ]
        assert [field for field, _ in structure._fields_] == fields
    assert ctypes.sizeof(interface.Pack) == 8 * 8 + 8
