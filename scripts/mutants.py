"""Makes random changes to the product, one at a time, and names the changes that no test notices.

A change reverses a comparison, swaps two operators, adds one to a number, negates a condition, or removes a statement.
A seed draws the places from the folders of `AREAS`. Each change is tried in a copy of the repository with the tests of
its area, until one of them fails. Test files that import the changed module, or have its name, come first. A survivor
means that a test is missing, or that the change has no effect.

    python scripts/mutants.py --count 100 --seed 7
    python scripts/mutants.py --count 100 --seed 7 --part 1/10   a tenth of the same changes, to run the rest later
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("client", "allocator_service", "gateway_service", "worker_service", "integrations/vllm")
ALLOCATOR_TESTS: Final = ("tests/allocator/core", "tests/allocator/twin", "tests/allocator", "tests/simulation")
SESSION_TESTS: Final = ("tests/allocator/session", "tests/simulation", "tests/client")
WORKER_TESTS: Final = ("tests/worker/test_scheduler.py", "tests/worker/test_order.py", "tests/worker")
GATEWAY_TESTS: Final = ("tests/gateway", "tests/security")
# Files to change, and the tests that may notice a change. The tests that notice most per second come first.
AREAS: Final = {
    "allocator_service/quire_allocator/core": ALLOCATOR_TESTS,
    "allocator_service/quire_allocator/wire": ("tests/allocator/session", "tests/simulation", *ALLOCATOR_TESTS),
    "allocator_service/quire_allocator/session": ("tests/allocator/session", "tests/simulation", "tests/allocator"),
    "client/quire/session": SESSION_TESTS,
    "worker_service/quire_worker/scheduling": WORKER_TESTS,
    "gateway_service/quire_gateway": GATEWAY_TESTS,
}
TESTS_S: Final = 1_800.0  # time limit for the tests of one change
# Ends the whole run at the time limit of a test. A signal handler would run only when the event loop regains control,
# and a mutant may never give control back.
HANGS: Final = "--timeout-method=thread"
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NO_TESTS: Final = 5  # pytest's exit code if it collects no tests
COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        path: path from the root of the repository.
        line: the first changed line, counted from 1.
        old, new: the original text, and its replacement.
        start, end: offsets in the file's bytes.
    """

    path: str
    line: int
    old: str
    new: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.old}\n    + {self.new}"


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the possible replacements of a node."""
    match node:
        case ast.Compare(left, ops, comparators):
            for number, operator in enumerate(ops):
                turned = [*ops[:number], COMPARED[type(operator)](), *ops[number + 1 :]]
                yield ast.Compare(left, turned, comparators)
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not _is_text(left):
            yield ast.BinOp(left, COMPUTED[type(operator)](), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("log")))):
            return
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def nodes_that_run(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes in bodies of functions, without annotations, assertions, messages and descriptions."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                    yield from walk(child)

    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name != "check_invariants":
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Raise | ast.Assert):
                    yield from walk(statement)


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yields every change of a file."""
    data = file.read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen = set()
    for node in nodes_that_run(ast.parse(data)):
        for change in changes_of(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(change))
            new = f"({new})" if isinstance(change, ast.expr) else new
            if (start, end, new) not in seen:
                seen.add((start, end, new))
                old = data[start:end].decode()
                yield Mutant(str(file.relative_to(ROOT)), node.lineno, old, new, start, end)


def draw(count: int, seed: int, areas: list[str]) -> list[Mutant]:
    """Draws `count` changes of each area. Longer files are drawn more often."""
    dice = random.Random(seed)
    drawn = []
    for number, area in enumerate(areas):
        share = count // len(areas) + (number < count % len(areas))
        possible = [each for file in sorted((ROOT / area).rglob("*.py")) for each in mutants_of(file)]
        drawn += dice.sample(possible, min(share, len(possible)))
    dice.shuffle(drawn)
    return drawn


def part_of(text: str) -> slice:
    """Reads "2/10", the second of ten parts: every tenth change from the second one on."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"there is no part {number} of {count}")
    return slice(number - 1, None, count)


def copy_repository(folder: Path) -> None:
    """Copies the working tree: git's files, and new files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def modules_of(test: Path) -> frozenset[str]:
    """Returns the modules that a test file imports. An imported name counts as a module, too, because it may be one."""
    found = set[str]()
    for node in ast.walk(ast.parse(test.read_bytes())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{name.name}" for name in node.names)))
    return frozenset(found)


def nearest(changed: str, paths: tuple[str, ...]) -> list[str]:
    """Returns the test files below some paths that import the changed file's module, or have its or its folder's name.

    Files with the fewest imports come first, because they test the fewest other modules.
    """
    source = next(source for source in SOURCES if changed.startswith(f"{source}/"))
    module = ".".join(Path(changed).relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    names = [set(part.strip("_").split("_")) for part in module.split(".")[1:]]
    imports = {}
    for path in paths:
        for test in [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"):
            modules = modules_of(test)
            if module in modules or any(words <= set(test.stem.split("_")) for words in names):
                imports[str(test.relative_to(ROOT))] = len(modules)
    return sorted(imports, key=lambda test: (imports[test], test))


def runs_of(mutant: Mutant) -> list[list[str]]:
    """Returns the arguments of each run of pytest that may notice a change. Each test is in one run.

    Each path has its own run: most changes fail in the first run, and collecting the other paths' tests would take
    longer than this run.
    """
    paths = next(tests for area, tests in AREAS.items() if mutant.path.startswith(area))
    done = nearest(mutant.path, paths)
    runs = [list(done)] if done else []
    for path in paths:
        if path not in done:
            runs.append([path, *(f"--ignore={each}" for each in done)])
            done.append(path)
    return runs


def failure_of(folder: Path, tests: Sequence[str]) -> str:
    """Runs tests in a copy of the repository. Returns the first test that fails, or an empty text if all tests pass.

    If no test is to blame, because the run does not end or ends early, the text says so.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder / source) for source in SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", HANGS, *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TESTS_S
        )
    except subprocess.TimeoutExpired:
        return f"{tests[0]} did not end"
    if done.returncode in (0, NO_TESTS):  # Earlier runs may have had all tests of this run, so none is left.
        return ""
    failed = FAILED.search(done.stdout)
    return failed[1] if failed else f"{tests[0]} ended with {done.returncode}"


def failure_with(mutant: Mutant, folder: Path) -> str:
    """Returns the first test of the change's area that notices it; empty if it survives.

    A busy machine fails tests, too. So a test has noticed the change if it also fails alone, and passes without it.
    """
    file = folder / mutant.path
    data = file.read_bytes()
    changed = data[: mutant.start] + mutant.new.encode() + data[mutant.end :]
    try:
        for tests in runs_of(mutant):
            passed_over: list[str] = []
            file.write_bytes(changed)
            while failure := failure_of(folder, [*tests, *passed_over]):
                if "::" not in failure:  # The run failed as a whole, and names no test.
                    return failure
                fails_alone = failure_of(folder, [failure])
                file.write_bytes(data)
                if fails_alone and not failure_of(folder, [failure]):
                    return failure
                file.write_bytes(changed)
                passed_over.append(f"--deselect={failure}")
        return ""
    finally:
        file.write_bytes(data)


def main() -> None:
    """Draws and tries changes, and names the survivors. Fails if there are more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of changes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed that draws the changes (default: %(default)s)")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="K/N", help="only the K-th of N parts")
    parser.add_argument("--areas", nargs="+", choices=list(AREAS), default=list(AREAS), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, help="changes tested at the same time (default: %(default)s)")
    parser.add_argument(
        "--survivors", type=int, default=5, help="changes that may survive without an error (default: %(default)s)"
    )
    options = parser.parse_args()
    mutants = draw(options.count, options.seed, options.areas)[options.part]
    print(f"{len(mutants)} changes, seed {options.seed}", flush=True)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as base:
        folders: Queue[Path] = Queue()
        for number in range(options.jobs):
            copy_repository(Path(base) / str(number))
            folders.put(Path(base) / str(number))

        def attempt(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return failure_with(mutant, folder)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, failure in zip(mutants, pool.map(attempt, mutants), strict=True):
                print(f"noticed: {mutant}\n    {failure}" if failure else f"SURVIVES: {mutant}", flush=True)
                survivors += [mutant] * (not failure)
    print(f"\n{len(survivors)} of {len(mutants)} changes were not noticed", *survivors, sep="\n")
    sys.exit(len(survivors) > options.survivors)


if __name__ == "__main__":
    main()
