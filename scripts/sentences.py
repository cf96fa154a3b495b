"""Draws sentences of this repository at random and prints each with its file and line, for a reader to mark.

    python scripts/sentences.py --seed 7
    python scripts/sentences.py --seed 7 --commit v0.4.0

It draws ten sentences of each kind: docstrings, comments, documents, and messages (errors, log lines and help of
commands). One seed always draws the same sentences of a commit. STYLE.md has the rules for marking them.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("client/quire/v1/", "docs/model/")
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical", "add_argument", "Option", "Argument"}
TEXTS_OF_CALLS = {"help", "epilog", "description"}
WORDS_MIN = 4  # fewer words are a name or a label
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`\"'(*])")


class Sentence(NamedTuple):
    """A sentence, and the line on which its paragraph begins."""

    path: str
    line: int
    text: str


def split(path: str, line: int, text: str) -> Iterator[Sentence]:
    """Yields the sentences of one paragraph."""
    for sentence in SENTENCE_END.split(" ".join(text.split())):
        if len(sentence.split()) >= WORDS_MIN and not sentence.startswith("--"):
            yield Sentence(path, line, sentence)


def docstrings(path: str, tree: ast.Module) -> Iterator[Sentence]:
    """Yields the sentences of all docstrings of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            for paragraph in docstring.split("\n\n") if docstring else ():
                if not paragraph.startswith("    "):  # An indented paragraph is code.
                    yield from split(path, node.body[0].lineno, paragraph)


def comments(path: str, source: str) -> Iterator[Sentence]:
    """Yields the sentences of all comments of a file. Successive comment lines are one comment."""
    first, last, texts = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            if not is_alone or token.start[0] != last + 1:
                yield from split(path, first, " ".join(texts))
                first, texts = token.start[0], []
            last = token.start[0] if is_alone else 0
            texts.append(token.string.lstrip("#! "))
    yield from split(path, first, " ".join(texts))


def messages(path: str, tree: ast.Module) -> Iterator[Sentence]:
    """Yields the texts of raised errors, of log calls, and of the help of options."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
        elif isinstance(node, ast.Call):
            found = [keyword.value for keyword in node.keywords if keyword.arg in TEXTS_OF_CALLS]
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOGGERS:
                found += node.args
        for text in found:
            if isinstance(text, ast.Constant | ast.JoinedStr):
                yield from split(path, text.lineno, ast.unparse(text).lstrip("f").strip("'\""))


def documents(path: str, text: str) -> Iterator[Sentence]:
    """Yields the sentences of a Markdown file, with the cells of its tables, without code."""
    is_code, first, paragraph = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_table = line.startswith("|")
        if is_code or is_table or not line.strip() or line.startswith(("#", "```")) or LIST_ITEM.match(line):
            yield from split(path, first, " ".join(paragraph))
            first, paragraph = number, []
        is_code ^= line.startswith("```")
        if is_table:
            for cell in re.split(r"(?<!\\)\|", line):
                yield from split(path, number, cell)
        elif not is_code and not line.startswith(("#", "```", "    ")):
            paragraph.append(LIST_ITEM.sub("", line))
            first = first if len(paragraph) > 1 else number


def files_of(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yields path and text of each Python and Markdown file of a commit, or of the working tree."""
    if commit is None:
        names = subprocess.run(
            ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in names.stdout.splitlines():
            if (ROOT / name).exists():
                yield name, (ROOT / name).read_text(encoding="utf-8")
        return
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        for member in files:
            content = files.extractfile(member) if member.name.endswith((".py", ".md")) else None
            if content is not None:
                yield member.name, content.read().decode()


def collect(commit: str | None) -> dict[str, list[Sentence]]:
    """Returns all sentences of a commit, by kind."""
    kinds: dict[str, list[Sentence]] = {"docstring": [], "comment": [], "document": [], "message": []}
    for path, text in sorted(files_of(commit)):
        if path.startswith(GENERATED):
            continue
        if path.endswith(".md"):
            kinds["document"] += documents(path, text)
            continue
        tree = ast.parse(text)
        kinds["docstring"] += docstrings(path, tree)
        kinds["comment"] += comments(path, text)
        if not path.startswith(("tests/", "benchmarks/")):
            kinds["message"] += messages(path, tree)
    return kinds


def main() -> None:
    """Draws and prints the sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="draws the same sentences again (default: %(default)s)")
    parser.add_argument("--count", type=int, default=10, help="sentences of each kind (default: %(default)s)")
    parser.add_argument("--commit", help="draws from this commit instead of the working tree")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    for kind, sentences in collect(options.commit).items():
        print(f"{kind}s ({len(sentences)})")
        for found in dice.sample(sentences, min(options.count, len(sentences))):
            print(f"  {found.path}:{found.line}\n    {found.text}")


if __name__ == "__main__":
    main()
