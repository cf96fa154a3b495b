"""scripts/shared_values.py writes the values that the client shares with the core from the core's definitions."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from quire import hashing, types
from quire.protocol import outcomes
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core import drop, spec

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "shared_values.py"
TUPLES = [
    (drop.CacheDrop, outcomes.CacheDrop),
    (spec.Copy, outcomes.Copy),
    (spec.Takeover, outcomes.Takeover),
    (spec.Victim, outcomes.Victim),
]
DATACLASSES = [(spec.GroupSpec, types.GroupSpec), (spec.PoolSpec, types.PoolSpec), (spec.Quota, types.Quota)]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the script's module, set up to work on a copy of the client."""
    loading = importlib.util.spec_from_file_location("shared_values", SCRIPT)
    assert loading is not None
    assert loading.loader is not None
    module = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(module)
    shutil.copytree(module.CLIENT, tmp_path / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CLIENT", tmp_path / "quire")
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["shared_values.py", *arguments])
    script.main()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hashing.py", "DIGEST_BYTES: Final = 32", "DIGEST_BYTES: Final = 16"),
        ("protocol/outcomes.py", "    NO_SPACE = 1\n", "    NO_SPACE = 7\n"),
        ("types.py", "    watermark_block_count: int = 0\n", "    watermark_block_count: int = 1\n"),
        ("types.py", "return min(group.block_size for", "return max(group.block_size for"),
    ],
)
def test_the_committed_files_are_fresh_and_a_changed_one_is_named_and_written_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, before: str, after: str
) -> None:
    run(script, monkeypatch, "--check")
    file: Path = script.CLIENT / name
    committed = file.read_text()
    file.write_text(committed.replace(before, after))
    with pytest.raises(SystemExit, match=f"outdated: quire/{name}; change the core"):
        run(script, monkeypatch, "--check")
    run(script, monkeypatch)
    assert file.read_text() == committed


def test_what_only_the_client_has_stays(script: ModuleType) -> None:
    core = {"Sort": "    ONE = 2\n", "Sort.twice": "    def twice(self) -> int:\n        return self + self\n"}
    body = "    def twice(self) -> int:\n        return 0\n\n    def half(self) -> int:\n        return 1\n"
    text = f"{script.MARKER}\nclass Sort(OpenEnum):\n    ONE = 1\n\n{body}\n\nclass Other:\n    ONE = 1\n"
    fresh = text.replace("ONE = 1", "ONE = 2", 1).replace("return 0", "return self + self")
    assert script.refreshed(text, core) == fresh


def test_a_value_that_the_core_does_not_have_cannot_be_shared_with_it(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="LOST is marked as shared in the client, but the core does not define it"):
        script.refreshed(f"{script.MARKER}\nLOST: Final = 1\n", {})


def test_both_sides_have_the_same_fields_numbers_and_defaults() -> None:
    assert (hashing.DIGEST_BYTES, outcomes.NULL_BLOCK) == (spec.DIGEST_BYTES, spec.NULL_BLOCK)
    for core, client in TUPLES:
        assert (core._fields, core._field_defaults) == (client._fields, client._field_defaults)
    for core, client in DATACLASSES:
        assert fields_of(core) == fields_of(client)
    results = {f"RESULT_{each.name}": each.value for each in spec.Result}
    assert results == {f"RESULT_{each.name}": each.value for each in outcomes.Result} == dict(pb.Result.items())


def fields_of(kind: type[Any]) -> list[tuple[str, object, object]]:
    return [(each.name, each.type, each.default) for each in dataclasses.fields(kind)]
