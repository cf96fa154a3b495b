"""Reads a short set of damaged model and adapter files and past findings of the long set, and shows that the set finds
planted bugs.

`make fuzz COUNT=1000000` runs the long set.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.model import headers
from quire_worker.model.adapters import peft_folder
from quire_worker.model.checkpoint import ModelError

from tests.fuzz import files as target
from tests.fuzz.files import FILES, FuzzedFiles, Readers, ViolationError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedFiles]:
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield FuzzedFiles(tmp_path_factory.mktemp("files"))
    torch.set_num_threads(thread_count)


def test_readers_read_what_is_damaged_or_say_what_is_wrong(files: FuzzedFiles) -> None:
    seen = run_many(files, 200)
    assert {kind.partition(":")[0] for kind in seen} == set(FILES)
    assert {kind.partition(": ")[2] for kind in seen} == {"read", "refused"}


def change_json(name: str, **fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))

    return change


def change_header(change: Callable[[dict[str, Any]], None], name: str) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(next(entry for tensor, entry in header.items() if tensor != "__metadata__"))
        written = json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])

    return change_file


def weight_map(folder: Path) -> None:
    change_json("model.safetensors.index.json", weight_map={"lm_head.weight": "x" * 300})(folder)


def long_subword_prefix(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    change_json("tokenizer.json", model=model | {"continuing_subword_prefix": "x" * 300})(folder)


FOUND: dict[str, tuple[str, Callable[[Path], None]]] = {
    "alpha beyond a float": ("adapter", change_json("adapter_config.json", lora_alpha=10**400)),
    "alpha that makes factors infinite": ("adapter", change_json("adapter_config.json", lora_alpha=1e300)),
    "a rank of thousands of words": ("adapter", change_json("adapter_config.json", r=["a"] * 5_000)),
    "a million dimensions": (
        "adapter",
        change_header(lambda entry: entry.update(shape=[9] * 150_000), "adapter_model.safetensors"),
    ),
    "a file with a long name": ("shards", weight_map),
    "layers without number": ("configuration", change_json("config.json", num_hidden_layers=10**12)),
    "a dtype that is none": ("configuration", change_json("config.json", dtype=1)),
    "a prefix of subwords that makes the library panic": ("tokenizer", long_subword_prefix),
    "an end of text that is a list of lists": ("model", change_json("generation_config.json", eos_token_id=[[1]])),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_refused_in_a_sentence(files: FuzzedFiles, tmp_path: Path, name: str) -> None:
    kind, change = FOUND[name]
    source, read = Readers(files.right).all[kind]
    folder = shutil.copytree(source, tmp_path / "spoiled")
    change(folder)
    with pytest.raises(ModelError) as caught, target.bounded(name):
        read(folder)
    assert len(str(caught.value)) < target.REFUSAL_CHARACTERS_MAX


def forgetful(*_: object) -> None:
    raise KeyError("a bug")


def endless(*_: object) -> None:
    while True:
        pass


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "an adapter's scale is not looked at": (peft_folder, "_scale_of", lambda *_: float("inf")),
    "reading a header crashes": (headers, "_checked", forgetful),
    "reading a header does not end": (headers, "_checked", endless),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(files: FuzzedFiles, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted = PLANTED[name]
    monkeypatch.setattr(owner, attribute, planted)
    monkeypatch.setattr(target, "CPU_S", 0.5)
    with pytest.raises(ViolationError):
        run_many(files, 200)


def run_many(files: FuzzedFiles, count: int) -> Counter[str]:
    seen = Counter[str]()
    for seed in range(count):
        files.run(seed, seen)
    return seen
