"""The library of CPU kernels: how it is found, compiled and refused."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cpu import build, library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns an empty cache folder, and turns off optimization, so that the library compiles in a few seconds."""
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
    assert "it exited with code 1" in str(library.load())
    assert list(cache.iterdir()) == []


def test_of_what_a_compiler_says_its_error_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compiler"
    said = "/tmp/a.s: Assembler messages:\n/tmp/a.s: Fatal error: can't write to /tmp/a.o: No space left on device"
    program.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(program))
    assert "No space left on device" in str(library.load())


def test_a_cache_that_others_may_write_to_is_not_loaded_from(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert "other users may write" in str(library.load())


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_folder_for_libraries_the_reason_says_what_to_set(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    assert "File exists" in str(library.load())
    assert "set QUIRE_CACHE to a folder that you can write" in str(library.load())
    for name in ("QUIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # Some containers run as a user that the system does not know, and this user has no home.
    monkeypatch.setattr(Path, "home", no_home)
    library.load.cache_clear()
    assert "home directory.: set QUIRE_CACHE" in str(library.load())


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)


@needs_compiler
@pytest.mark.parametrize("size", [0, -1])
def test_a_library_that_was_cut_off_is_made_again(cache: Path, size: int) -> None:
    whole = library.load()
    assert isinstance(whole, library.Library)
    data = whole.path.read_bytes()
    damaged = cache / "copy"
    damaged.write_bytes(data[:size])
    damaged.chmod(0o755)
    # This process has the library loaded, so the file is replaced, not overwritten.
    damaged.replace(whole.path)
    library.load.cache_clear()
    again = library.load()
    assert isinstance(again, library.Library)
    assert build.is_whole(again.path)
    assert len(again.path.read_bytes()) == len(data)


@needs_compiler
def test_a_library_that_others_may_write_to_is_made_again_and_written_by_nobody(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        made = library.load()
        assert isinstance(made, library.Library)
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o755
        made.path.chmod(0o775)
        inode = made.path.stat().st_ino
        library.load.cache_clear()
        again = library.load()
        assert isinstance(again, library.Library)
        assert (again.path.stat().st_ino != inode, stat.S_IMODE(again.path.stat().st_mode)) == (True, 0o755)
    finally:
        os.umask(before)


@needs_compiler
def test_a_link_in_the_cache_is_not_followed(cache: Path, tmp_path: Path) -> None:
    made = library.load()
    assert isinstance(made, library.Library)
    elsewhere = tmp_path / "elsewhere.so"
    made.path.rename(elsewhere)
    made.path.symlink_to(elsewhere)
    library.load.cache_clear()
    again = library.load()
    assert isinstance(again, library.Library)
    assert not again.path.is_symlink()


@needs_compiler
@pytest.mark.parametrize("unknown", ["-mavx512f"])
def test_a_compiler_that_is_older_than_a_set_of_instructions_makes_the_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unknown: str
) -> None:
    old = tmp_path / "old-c++"
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    old.write_text(f"""#!/bin/sh
for flag in "$@"; do
    case "$flag" in
        {unknown}|-march=x86-64-v*) echo "unrecognized command-line option '$flag'" >&2; exit 1;;
    esac
done
exec {real} "$@"
""")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    made = library.load()
    assert isinstance(made, library.Library)
    assert made.instruction_sets[-1] == "baseline"
    assert not {"avx512bf16", "avx512"} & set(made.instruction_sets)


def test_other_sources_or_flags_are_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.library_name() != before


def test_it_is_switched_off_by_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU", "0")
    assert "QUIRE_CPU=0" in str(library.load())


def test_the_structures_are_as_large_as_the_header_says() -> None:
    """ctypes and the C compiler pad in the same way, so a field that is missing on one side changes the size."""
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
