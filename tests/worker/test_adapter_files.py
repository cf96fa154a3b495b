"""An adapter's files are read once, only from allowed folders, and refused if PEFT would change the base model."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from quire.errors import QuireError, Reason
from quire_worker.model.adapters import peft_folder
from quire_worker.model.adapters.peft_folder import AdapterError
from quire_worker.requests.adapters import LIMITS, Adapters

from tests.worker.adapter_folders import CONFIG, WEIGHTS, change_config, write_adapter
from tests.worker.engine_harness import paged_model
from tests.worker.tiny_models import write_tiny_llama


class Files(NamedTuple):
    """A checkpoint, and its adapters by name."""

    base: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("files")
    (root / "base").mkdir()
    write_tiny_llama(root / "base")
    return Files(
        root / "base", {name: write_adapter(root / name, root / "base", seed=seed) for seed, name in enumerate("ab")}
    )


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
async def test_files_of_an_adapter_that_a_call_loads_are_below_the_folder_too(
    files: Files, tmp_path: Path, name: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(files.adapters["a"], root / "a")
    (root / "a" / name).rename(tmp_path / name)
    (root / "a" / name).symlink_to(tmp_path / name)
    adapters = Adapters(paged_model(files.base), LIMITS, root)
    with pytest.raises(QuireError, match="a link to outside the worker's folder of adapters") as caught:
        await adapters.load("a", "a")
    assert caught.value.reason is Reason.ADAPTER_UNUSABLE
    (root / "blobs").mkdir()
    (tmp_path / name).rename(root / "blobs" / "x")  # In Hugging Face's cache, files link to `blobs`.
    (root / "a" / name).unlink()
    (root / "a" / name).symlink_to(root / "blobs" / "x")
    assert (await adapters.load("a", "a")).name == "a"


def test_a_digest_is_of_the_bytes_that_are_computed_with(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged_model(files.base)
    expected = {name: Adapters(model).read(name, files.adapters[name]) for name in ("a", "b")}
    folder = shutil.copytree(files.adapters["a"], tmp_path / "changing")
    read = peft_folder._read

    def read_and_replace(of: Path, name: str, *limits: Any) -> bytes:
        data = read(of, name, *limits)
        shutil.copy(files.adapters["b"] / name, folder / name)
        return data

    monkeypatch.setattr(peft_folder, "_read", read_and_replace)
    adapter = Adapters(model).read("a", folder)
    assert adapter.digest == expected["a"].digest
    for layer, factors in adapter.factors.items():
        assert torch.equal(factors.up, expected["a"].factors[layer].up)


@pytest.mark.parametrize("begun", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_how_plain_lora_was_begun_means_nothing(files: Files, tmp_path: Path, begun: object) -> None:
    folder = shutil.copytree(files.adapters["a"], tmp_path / "a")
    change_config(folder, init_lora_weights=begun)
    assert Adapters(paged_model(files.base)).read("a", folder).rank == 4


def test_every_field_of_the_installed_peft_is_honoured_refused_or_known_to_mean_nothing() -> None:
    looked_at = peft_folder._KNOWN | peft_folder._MEANINGLESS
    refused_unless_false = {
        "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "megatron_config", "use_dora",
        "trainable_token_indices", "velora_config", "alora_invocation_tokens", "use_qalora", "monteclora_config",
        "layer_replication", "lora_bias", "target_parameters", "use_bdlora", "arrow_config", "kasa_config",
    }  # fmt: skip
    fields = {each.name for each in dataclasses.fields(LoraConfig)}
    assert not fields - looked_at - refused_unless_false, "a new field: look at what it does to an adapter"
    assert not looked_at & refused_unless_false


@pytest.mark.parametrize(
    "begun", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "of tomorrow"]
)
def test_an_adapter_that_changes_its_base_is_refused(files: Files, tmp_path: Path, begun: str) -> None:
    folder = shutil.copytree(files.adapters["a"], tmp_path / "a")
    change_config(folder, init_lora_weights=begun)
    with pytest.raises(AdapterError, match=f"init_lora_weights = '{begun}', which changes the base model's weights"):
        Adapters(paged_model(files.base)).read("a", folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"target_modules": ["q_proj"]},
        {"exclude_modules": ["v_proj"]},
        {"exclude_modules": ["model.layers.0.self_attn.v_proj"]},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1]},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": "q_proj"},
        {"exclude_modules": r"model\.layers\.0\..*"},
        {"exclude_modules": r".*v_pro."},
    ],
    ids=str,
)
def test_tensors_that_peft_would_leave_out_are_refused(
    files: Files, tmp_path: Path, entries: dict[str, object]
) -> None:
    folder = shutil.copytree(files.adapters["a"], tmp_path / "a")
    change_config(folder, **entries)
    with pytest.raises(AdapterError, match=f"which {next(iter(entries))} in {CONFIG} excludes"):
        Adapters(paged_model(files.base)).read("a", folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"target_modules": "(q_proj"}, "target_modules = '\\(q_proj', which is not a regular expression"),
        ({"exclude_modules": "(.*.*.*.*.*.*)*x"}, "exclude_modules = .* which takes more than 10 s to match"),
        ({"exclude_modules": 5}, "exclude_modules = 5, which must be a string or a list"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_known_are_refused(
    files: Files, tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(files.adapters["a"], tmp_path / "a")
    change_config(folder, **entries)
    with pytest.raises(AdapterError, match=message):
        Adapters(paged_model(files.base)).read("a", folder)


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_transform": 1},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"exclude_modules": ["v_proj", "model.layers.0.mlp.up_proj"]},
        {"targets": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
        {"targets": r".*\.(q|v)_proj"},
        {"targets": r"^(?!.*up_proj).*layers\.(0|1)\..*_proj$", "exclude_modules": r".*\.down_proj"},
        {"exclude_modules": r".*\.v_proj"},
        {"targets": "ALL-LINEAR", "exclude_modules": ["v_proj"]},
        {"targets": "all-linear"},
    ],
    ids=str,
)
def test_what_peft_has_saved_for_some_layers_alone_is_read(
    files: Files, tmp_path: Path, options: dict[str, Any]
) -> None:
    targets = options.pop("targets", ["q_proj", "v_proj", "up_proj"])
    write_adapter(tmp_path / "a", files.base, seed=2, targets=targets, **options)
    assert Adapters(paged_model(files.base)).read("a", tmp_path / "a").factors


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_is_no_file_is_refused(files: Files, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(files.adapters["a"], tmp_path / "a")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match=f"{name} is not a regular file"):
        Adapters(paged_model(files.base)).read("a", folder)
