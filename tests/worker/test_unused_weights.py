"""Tensors of a checkpoint that its architecture lacks are refused by name if they belong to the text model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import structlog
import torch
from quire_worker.model.checkpoint import CheckpointError
from quire_worker.model.kv_scales import read_scales
from quire_worker.model.loading import load_model
from safetensors.torch import load_file, save_file

from tests.worker.tiny_models import write_tiny, write_tiny_llama

FILE = "model.safetensors"
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


def with_tensors(base: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    shutil.copytree(base, folder)
    save_file(load_file(folder / FILE) | tensors, folder / FILE, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


CHANGES_TEXT = {
    "a bias of a projection": f"{LAYER}.self_attn.q_proj.bias",
    "a norm of queries": f"{LAYER}.self_attn.q_norm.weight",
    "a further norm": f"{LAYER}.post_feedforward_layernorm.weight",
    "a bias of a norm": f"{LAYER}.input_layernorm.bias",
    "sinks": f"{LAYER}.self_attn.sinks",
    "scales of quantised weights": f"{LAYER}.mlp.up_proj.weight_scale",
    "a bias that is named as the masks of others": f"{LAYER}.attention.bias",
    "a layer beyond the last": "model.layers.2.mlp.up_proj.weight",
    "a bias of the last norm": "model.norm.bias",
    "a norm of the embeddings": "model.embed_norm.weight",
    "positions that were learnt": "model.embed_positions.weight",
    "a bias of the head": "lm_head.bias",
    "a name without the decoder's": "layers.0.self_attn.k_proj.bias",
}


@pytest.mark.parametrize("name", CHANGES_TEXT)
def test_a_tensor_that_the_architecture_would_leave_out_of_each_text_is_refused_by_name(
    llama: Path, tmp_path: Path, name: str
) -> None:
    folder = with_tensors(llama, tmp_path / "model", {CHANGES_TEXT[name]: torch.full((64,), 0.5)})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert f"have {CHANGES_TEXT[name]}, which a LlamaForCausalLM does not use" in str(caught.value)


MEANS_NOTHING = {
    "frequencies of each layer": (f"{LAYER}.self_attn.rotary_emb.inv_freq", torch.ones(8)),
    "a mask of GPT-NeoX": (f"{LAYER}.attention.bias", torch.ones(1, 1, 16, 16, dtype=torch.bool)),
    "what a mask of GPT-2 hides with": (f"{LAYER}.attn.masked_bias", torch.tensor(-1e9)),
    "a bias of zeros": (f"{LAYER}.self_attn.o_proj.bias", torch.zeros(64)),
    "a scale of queries": (f"{LAYER}.self_attn.q_scale", torch.tensor(2.0)),
    "a scale of keys": (f"{LAYER}.self_attn.k_scale", torch.tensor(2.0)),
    "a tower for images": ("model.vision_tower.encoder.layers.0.self_attn.q_proj.bias", torch.ones(8)),
    "drafting layers of their own": ("mtp.layers.0.self_attn.q_proj.weight", torch.ones(8, 8)),
    "a value head": ("v_head.summary.weight", torch.ones(1, 64)),
}


@pytest.mark.parametrize("name", MEANS_NOTHING)
def test_a_tensor_that_says_nothing_of_the_text_is_left_unread(llama: Path, tmp_path: Path, name: str) -> None:
    tensor, value = MEANS_NOTHING[name]
    model = load_model(with_tensors(llama, tmp_path / "model", {tensor: value}))
    assert model.architecture == "LlamaForCausalLM"


def test_what_is_left_unread_is_logged_by_name(llama: Path, tmp_path: Path) -> None:
    folder = with_tensors(llama, tmp_path / "model", {"v_head.summary.weight": torch.ones(1, 64)})
    with structlog.testing.capture_logs() as lines:
        load_model(folder)
    assert [line["weights"] for line in lines if line["event"] == "unused_weights"] == ["v_head.summary.weight"]


def test_drafting_layers_are_as_many_as_the_configuration_says(llama: Path, tmp_path: Path) -> None:
    draft = {f"model.layers.{layer}.eh_proj.weight": torch.ones(64, 128) for layer in (2, 3)}
    load_model(with_tensors(llama, tmp_path / "two", draft, num_nextn_predict_layers=2))
    with pytest.raises(CheckpointError, match=r"have model\.layers\.3\.eh_proj\.weight,"):
        load_model(with_tensors(llama, tmp_path / "one", draft, num_nextn_predict_layers=1))


def test_keys_of_layers_that_read_those_of_others_are_left_unread(tmp_path: Path) -> None:
    base = write_tiny("gemma3n", tmp_path / "base")
    last = json.loads((base / "config.json").read_text())["num_hidden_layers"] - 1
    name = f"model.layers.{last}.self_attn.k_proj.weight"
    load_model(with_tensors(base, tmp_path / "shared", {name: torch.ones(32, 64)}))
    other = f"model.layers.{last}.self_attn.o_norm.weight"
    with pytest.raises(CheckpointError, match=other):
        load_model(with_tensors(base, tmp_path / "other", {other: torch.ones(64)}))


def test_scales_of_keys_and_values_are_read_under_the_names_of_compressed_tensors(llama: Path, tmp_path: Path) -> None:
    named = {
        f"{LAYER}.self_attn.k_proj.output_scale": torch.tensor(2.0),
        f"{LAYER}.self_attn.v_proj.output_scale": torch.tensor([4.0]),
    }
    folder = with_tensors(llama, tmp_path / "model", named)
    assert read_scales(folder) == {1: (2.0, 4.0)}
    load_model(folder)
