"""Checks house rules: sizes, docstrings, comments, no leftovers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "allocator_service", "gateway_service", "worker_service")
FOLDERS = (*PACKAGES, "scripts", "benchmarks", "examples", "conformance", "integrations", "tests")
GENERATED = ROOT / "client" / "quire" / "v1"
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if GENERATED not in path.parents)
SHIPPED = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in PACKAGES]
TEXT_SUFFIXES = {".py", ".md", ".proto", ".toml", ".sh", ".yml", ".yaml", ".json"}
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
DOCSTRING_WORDS_MIN = 4
# Docstrings that begin with these words have no subject.
NO_SUBJECT = ("Of ", "By ", "For ", "As ", "In ", "Without ")
# The words are split so that this check does not find its own file.
LEFTOVERS = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|HA" + "CK")
MACHINE_PATHS = re.compile(r"(?<![\w.:/}])/(?:" + "ho" + "me|Us" + "ers|ro" + "ot|wo" + r"rk)/\w")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions_in(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts a function's lines without its docstring, because FlashInfer's calls document two dozen arguments, one per
    line."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def public_definitions(body: list[ast.stmt], *, within: str = "") -> Iterator[tuple[str, Definition]]:
    """Yields public classes, functions and methods, except overloads and a servicer's methods. The protos document
    these."""
    for node in body:
        if isinstance(node, Definition) and any(ast.unparse(each) == "overload" for each in node.decorator_list):
            continue
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{within}{node.name}", node
            if isinstance(node, ast.ClassDef):
                overrides = any(ast.unparse(base).endswith("Servicer") for base in node.bases)
                rpcs = [n for n in node.body if isinstance(n, Definition) and n.name[:1].isupper()] if overrides else []
                rest = [n for n in node.body if n not in rpcs]
                yield from public_definitions(rest, within=f"{within}{node.name}.")


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) > 40
    assert len(PROTOS) == 4


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES_MAX, f"{lines} lines"
    long = {function.name: code_lines(function) for function in functions_in(path)}
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES_MAX}


@pytest.mark.parametrize("path", [path for path in PYTHON if not path.name.startswith("test_")], ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body, "no module docstring"


@dataclass
class ClassFacts:
    """Facts about all classes with the same name: their bases, and the methods that they document."""

    bases: set[str] = field(default_factory=set)
    documented: set[str] = field(default_factory=set)


def classes_by_name() -> dict[str, ClassFacts]:
    """Returns every class of the packages, by its name without a module."""
    found: dict[str, ClassFacts] = {}
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                facts = found.setdefault(node.name, ClassFacts())
                facts.bases |= {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
                facts.documented |= {n.name for n in node.body if isinstance(n, Definition) and ast.get_docstring(n)}
    return found


def is_documented_above(name: str, classes: dict[str, ClassFacts]) -> bool:
    """Returns whether a base of the class documents the method. A `name` without a class overrides nothing."""
    owner, _, method = name.rpartition(".")
    above, seen = [owner.rpartition(".")[2]], set[str]()
    while above:
        for base in classes.get(above.pop(), ClassFacts()).bases - seen:
            seen.add(base)
            above.append(base)
            if method in classes.get(base, ClassFacts()).documented:
                return True
    return False


CLASSES = classes_by_name()


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_every_public_class_and_function_says_what_it_does_or_its_interface_does(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [name for name, node in public_definitions(tree.body) if not ast.get_docstring(node)]
    assert not [name for name in silent if not is_documented_above(name, CLASSES)]


def test_an_override_needs_no_docstring_of_its_own_and_nothing_else_goes_without() -> None:
    classes = {
        "Manager": ClassFacts(documented={"settle"}),
        "WindowManager": ClassFacts(bases={"Manager"}),
        "ChunkManager": ClassFacts(bases={"WindowManager"}),
    }
    assert is_documented_above("ChunkManager.settle", classes)
    assert not is_documented_above("ChunkManager.room", classes)
    assert not is_documented_above("Manager.settle", classes)
    assert not is_documented_above("settle", classes)


@pytest.mark.parametrize("path", [path for path in PYTHON if "tests" not in path.parts], ids=name_of)
def test_every_docstring_has_a_subject_and_a_verb(path: Path) -> None:
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Definition | ast.Module)
    ]
    texts = {getattr(node, "name", "the module"): ast.get_docstring(node) or "" for node in nodes}
    assert not {name: text for name, text in texts.items() if text and len(text.split()) < DOCSTRING_WORDS_MIN}
    assert not {name: text for name, text in texts.items() if text.startswith(NO_SUBJECT)}


@pytest.mark.parametrize("path", [path for path in PYTHON if path.name.startswith("test_")], ids=name_of)
def test_no_test_sleeps(path: Path) -> None:
    if "e2e" in path.parts:
        pytest.skip("containers can only be polled")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sleep"):
            yields = [ast.unparse(argument) for argument in node.args] == ["0"]
            assert yields, f"line {node.lineno} sleeps"


def test_nothing_is_left_for_later_and_no_machine_is_named() -> None:
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in {".ci", ".github"} for part in parts)
        is_ours = not hidden and parts[0] not in ("models", "build")
        if not is_ours or path.suffix not in TEXT_SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if LEFTOVERS.search(line) or MACHINE_PATHS.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert not found


def undocumented(proto: str) -> Iterator[str]:
    """Yields the lines that declare an element without a comment above them or above a group that they belong to."""
    element = re.compile(
        r"\s*(?:(?:message|enum|service|rpc)\s+\w+|(?:(?:repeated|optional)\s+)?[\w.]+\s+\w+\s*=\s*\d+|\w+\s*=\s*\d+)"
    )
    above = ""
    for line in proto.splitlines():
        is_element = element.match(line) is not None and not line.startswith(("syntax", "package"))
        shares = element.match(above) is not None and "{" not in above and above.strip() != ""
        if is_element and not above.strip().startswith("//") and not shares:
            yield line.strip()
        above = line


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_element_of_the_protos_has_a_comment(path: Path) -> None:
    assert list(undocumented(path.read_text(encoding="utf-8"))) == []


def test_a_silent_proto_element_would_be_noticed() -> None:
    assert list(undocumented("message A {\n  uint32 b = 1;\n}\n")) == ["message A {", "uint32 b = 1;"]
    assert list(undocumented("// A.\nmessage A {\n  // Both.\n  uint32 b = 1;\n  uint32 c = 2;\n}\n")) == []


# Docstrings that begin with these words have no subject, or a subject that the reader must search for.
NO_NAMED_SUBJECT = re.compile(r"(?:What|Who|Whom|Whoever|Whose|Those|Does (?:the same|so)|The same) ")


def docstrings_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition | ast.Module) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def without_a_named_subject(source: str) -> dict[int, str]:
    """Returns the first lines of docstrings that begin with a pronoun instead of a thing's name, by line number."""
    return {line: text.splitlines()[0] for line, text in docstrings_in(source) if NO_NAMED_SUBJECT.match(text)}


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_every_docstring_begins_with_a_thing_or_a_verb(path: Path) -> None:
    assert without_a_named_subject(path.read_text(encoding="utf-8")) == {}


def test_a_docstring_without_a_named_subject_would_be_noticed() -> None:
    source = (
        '"""What is kept."""\ndef f():\n    """Does the same for one."""\ndef g():\n    """Returns what is kept."""\n'
    )
    assert without_a_named_subject(source) == {1: "What is kept.", 3: "Does the same for one."}
