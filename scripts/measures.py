"""Prints the size of the core, how widely its words are used, names used twice, and hits, each measure with its goal.

    python scripts/measures.py

Words of retention are counted in names, docstrings and comments, but not in import lines. The field `stops` is a list
of token counts: an answer of the allocator carries the list to its owner's ledger, and a report carries the list back.
The field is counted outside the modules that decide about stops. Names of classes and files are counted in the whole
product, without what scripts write from another file. Hits are those of the committed rows of `benchmarks/hybrid.py`:
the newest rows of Quire beside the rows of vLLM's two managers, for the same scenarios.
"""

from __future__ import annotations

import ast
import csv
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from shared_values import MARKER

ROOT: Final = Path(__file__).resolve().parent.parent
CORE: Final = ROOT / "allocator_service/quire_allocator/core"
PRODUCT: Final = ("allocator_service", "client", "gateway_service", "worker_service")
GENERATED: Final = ROOT / "client/quire/v1"
RETENTION: Final = frozenset({
    *("aside", "burden", "burdens", "junction", "junctions", "led", "parting", "partings"),
    *("spare", "stop", "stops", "worth"),
})  # fmt: skip
# Modules that make, rebuild, check and count stops. In them, `stops` is a list of `Stop` objects, not the field.
KEEPING: Final = {
    *(CORE / "retention").glob("*.py"),
    *(CORE / "rebuild/stops.py", CORE / "readers/retention.py", CORE.parent / "session/caller_memory.py"),
}
WORTHS: Final = frozenset({"SPARE", "ASIDE", "LED"})  # RANKED does not count, because every entry starts with it.
MEAN_HIT_RATIO: Final = 0.473  # mean of the drawn scenarios at commit fb7303a
DOORS: Final = re.compile(r"(grow|grant|append|extend)(_\w+)?")


class Measure(NamedTuple):
    """A measure with its goal, which is the largest allowed value."""

    name: str
    value: float
    goal: float


def sources(*folders: Path) -> list[Path]:
    """Returns the Python files below some folders, without generated ones."""
    found = {path for folder in folders for path in folder.rglob("*.py")}
    return sorted(path for path in found if GENERATED not in path.parents and "build" not in path.parts)


def line_count(paths: Iterable[Path]) -> int:
    """Counts all lines, blank ones included."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def words(path: Path) -> set[str]:
    """Returns the words of a file. Names are split at underscores and capital letters."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^from \S+ import (\([^)]*\)|.*)$|^import .*$", "", text, flags=re.MULTILINE)
    text = text.replace(".stop", "")  # `.stop` is the end of a range, not a word of retention.
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}


def names(path: Path) -> set[str]:
    """Returns all identifiers that a file's code uses, fields and arguments included."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name)
    return found


def has_field(path: Path, field: str) -> bool:
    """Returns whether a file has or uses a field: in a class, as an attribute, or as a keyword argument.

    Local variables, parameters and texts do not count, because other things have the same name there.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            targets = [member.target for member in node.body if isinstance(member, ast.AnnAssign)]
            if any(isinstance(target, ast.Name) and target.id == field for target in targets):
                return True
        elif (isinstance(node, ast.Attribute) and node.attr == field) or (
            isinstance(node, ast.keyword) and node.arg == field
        ):
            return True
    return False


def doors(paths: Iterable[Path]) -> set[str]:
    """Returns the methods through which a live sequence gets blocks. Overrides do not count again."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    takers = {"Pool", "Coordinator", "Manager"}
    return {
        f"{each.name}.{method.name}"
        for each in classes
        if each.name in takers
        for method in each.body
        if isinstance(method, ast.FunctionDef) and DOORS.fullmatch(method.name)
    }


def class_names(path: Path) -> set[str]:
    """Returns the names of a file's classes, without those that are written from the core's."""
    lines = path.read_text(encoding="utf-8").splitlines()
    classes = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.ClassDef)]
    firsts = {each.name: min(line.lineno for line in (each, *each.decorator_list)) for each in classes}
    return {name for name, first in firsts.items() if lines[first - 2] != MARKER}


def used_twice(found: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return sorted(name for name, count in Counter(found).items() if count > 1)


def glossary() -> list[str]:
    """Returns the words of the glossary in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Words\n")[1]
    rows = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    return [word.strip() for row in rows for word in row.split("|")[1].split(",")]


def compared_hits(results: str, *scenario: str) -> list[tuple[float, float]]:
    """Returns the hit ratios of Quire and of the better of vLLM's two managers for each scenario of a results file."""
    own, better = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
    with (ROOT / "benchmarks/results" / results).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple(row[column] for column in scenario)
            own[key] = float(row["quire"])  # Rows of later commits come later, so the newest row stays.
            if row["vllm dense"]:
                better[key] = max(float(row["vllm dense"]), float(row["vllm sparse"]))
    return [(own[key], better[key]) for key in own]


def hits() -> list[Measure]:
    """Returns the measures of the hits of drawn scenarios, and of the points of chosen models and workloads."""
    drawn = compared_hits("hybrid_random.csv", "scenario")
    points = compared_hits("hybrid.csv", "shape", "workload", "load")
    lost = MEAN_HIT_RATIO - statistics.mean(own for own, _ in drawn)
    worse = sum(own < better - 0.01 for own, better in drawn)
    gaps = [better - own for own, better in points if own < better]
    return [
        Measure(f"mean hit ratio lost, {len(drawn)} scenarios", round(lost, 4), 0.004),
        Measure("percent of them more than 0.01 below vLLM", round(100 * worse / len(drawn), 2), 2),
        Measure(f"of {len(points)} points below vLLM", len(gaps), 3),
        Measure("largest of these gaps", round(max(gaps, default=0), 4), 0.02),
    ]


def measures() -> list[Measure]:
    """Returns all measures with their goals."""
    core = sources(CORE)
    deciding = [path for path in core if path.parent.name not in {"readers", "rebuild"}]
    product = sources(*(ROOT / folder for folder in PRODUCT))
    naming = [path for path in product if path not in KEEPING and has_field(path, "stops")]
    written = [path for path in product if path.parent.name != "_sync"]
    classes = used_twice(name for path in written for name in class_names(path))
    files = used_twice(path.name for path in written if path.name != "__init__.py")
    print("classes:", *classes, "\nfiles:", *files, file=sys.stderr)
    show("words of retention", [path for path in core if words(path) & RETENTION])
    show("naming stops", naming)
    show("what leaves next", [path for path in deciding if names(path) & WORTHS])
    print("doors:", *sorted(doors(core)), sep="\n    ", file=sys.stderr)
    return [
        Measure("lines of the core", line_count(core), 8_600),
        Measure("lines of core/groups", line_count(sources(CORE / "groups")), 3_400),
        Measure("files of the core with words of retention", sum(bool(words(path) & RETENTION) for path in core), 12),
        Measure("files of the product with the field `stops`", len(naming), 8),
        Measure("files that tell which block leaves next", sum(bool(names(path) & WORTHS) for path in deciding), 4),
        Measure("doors of a grow", len(doors(core)), 5),
        Measure("words of the glossary", len(glossary()), 50),
        Measure("names of classes used twice", len(classes), 44),
        Measure("names of files used twice", len(files), 39),
        *hits(),
    ]


def show(title: str, paths: Iterable[Path]) -> None:
    """Prints a title and the files' paths to standard error."""
    print(f"{title}:", *(path.relative_to(ROOT) for path in paths), sep="\n    ", file=sys.stderr)


if __name__ == "__main__":
    for measure in measures():
        print(f"{measure.name:48} {measure.value:7,}  goal {measure.goal:6,}")
