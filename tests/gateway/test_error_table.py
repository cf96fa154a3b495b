"""The table of errors in docs/gateway.md has each status and code that the gateway's sources give, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from quire_gateway import failures

ROOT = Path(__file__).resolve().parents[2]
NONE = "none"
# The framework's errors for unknown paths and methods. `make_app` gives these errors the gateway's form.
OF_HTTP = {(404, NONE), (405, NONE)}


def in_the_sources() -> Iterator[tuple[int, str]]:
    for path in (ROOT / "gateway_service").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "ApiError"):
                continue
            if isinstance(status := call.args[0], ast.Constant):
                yield status.value, next((code_of(each.value) for each in call.keywords if each.arg == "code"), NONE)


def code_of(value: ast.expr) -> str:
    return getattr(failures, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)


def of_workers() -> Iterator[tuple[int, str]]:
    for status, _, code in (*failures._BY_CODE.values(), *failures._BY_REASON.values(), failures._OTHERWISE):
        yield status, code or NONE


def in_the_table() -> Iterator[tuple[int, str]]:
    text = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    for line in text.partition("\n## ")[0].splitlines():
        statuses, codes = (*line.split("|"), "", "", "")[1:3]
        for status in re.findall(r"\d{3}", statuses):
            for code in re.findall(r"[a-z_]+", codes):
                yield int(status), code


def test_the_documents_table_has_each_error_of_the_gateway() -> None:
    assert sorted(set(in_the_table())) == sorted({*in_the_sources(), *of_workers(), *OF_HTTP})
