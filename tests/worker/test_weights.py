"""Loading of weights: refusals, log lines, and memory use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from quire_worker.model import weights as weights_file
from quire_worker.model.checkpoint import CheckpointError, ModelError, weight_files
from quire_worker.model.loading import load_model
from quire_worker.process.options import parse_arguments
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.worker.tiny_models import tiny_shape, write_model, write_tiny_llama

UP = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    return str(caught.value)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = (folder / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])


def cut(folder: Path, share: float) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: int(len(data) * share)])


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a tensor is missing": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop(UP)),
        [FILE, f"lack {UP}"],
    ),
    "a tensor has another shape": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({UP: torch.zeros(96, 32)})),
        [FILE, UP, "[96, 32]", "needs [96, 64]"],
    ),
    "a tensor holds integers": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({UP: torch.zeros(96, 64).long()})),
        [FILE, UP, "I64", "quantization_config"],
    ),
    "a tensor holds bytes of floats": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({UP: torch.zeros(96, 64, dtype=torch.float8_e4m3fn)})
        ),
        [FILE, UP, "F8_E4M3", "quantization_config"],
    ),
    "the file was cut off in its data": (lambda folder: cut(folder, 0.9), [FILE, "truncated: tensor model."]),
    "the file was cut off in its header": (lambda folder: cut(folder, 0.001), [FILE, "begins with the length"]),
    "the file is empty": (lambda folder: cut(folder, 0), [FILE, "it has 0 bytes"]),
    "the file is no safetensors file": (
        lambda folder: (folder / FILE).write_bytes(b"PK\x03\x04" * 100),
        [FILE, "begins with the length"],
    ),
    "the header is no JSON": (
        lambda folder: (folder / FILE).write_bytes((4).to_bytes(8, "little") + b"{]]}"),
        [FILE, "not a JSON object"],
    ),
    "the header is no object": (
        lambda folder: (folder / FILE).write_bytes((4).to_bytes(8, "little") + b"[[]]"),
        [FILE, "not a JSON object"],
    ),
    "a dtype is unknown": (
        lambda folder: change_header(folder, lambda header: header[UP].update(dtype="F12")),
        [FILE, UP, "has no valid entry"],
    ),
    "a size does not fit the shape": (
        lambda folder: change_header(folder, lambda header: header[UP].update(shape=[96, 63])),
        [FILE, UP, "F32 [96, 63] does not take 24,576 bytes"],
    ),
    "tensors overlap": (
        lambda folder: change_header(
            folder, lambda header: header[UP].update(data_offsets=[24_576, 49_152])
        ),
        [FILE, "begins at byte"],
    ),
    "bytes follow the last tensor": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"more"),
        [FILE, "4 bytes at its end"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_in_one_sentence_that_names_file_and_tensor(folder: Path, name: str) -> None:
    damage, named = DAMAGES[name]
    damage(folder)
    message = refusal(folder)
    assert all(part in message for part in named), message
    assert "\n" not in message


@pytest.fixture
def sharded(llama: Path, tmp_path: Path) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return tmp_path / "sharded"


def index_of(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_bytes())
    return index


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_missing_shard_is_refused_with_its_name_and_a_tensor_of_it(sharded: Path) -> None:
    shard = index_of(sharded)["weight_map"][UP]
    (sharded / shard).unlink()
    message = refusal(sharded)
    assert shard in message
    assert "for tensor model." in message


def test_a_shard_without_a_tensor_of_the_index_is_refused(sharded: Path) -> None:
    index = index_of(sharded)
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard = index["weight_map"][UP]
    write_index(sharded, index)
    assert f"{shard} lacks tensor model.layers.7.mlp.up_proj.weight" in refusal(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    places = index_of(sharded)["weight_map"]
    other = next(name for name in places.values() if name != places[UP])
    tensors = load_file(sharded / other)
    save_file(tensors | {UP: torch.zeros(96, 64)}, sharded / other, metadata={"format": "pt"})
    assert f"tensor {UP} is in" in refusal(sharded)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none_is_refused(sharded: Path, index: object) -> None:
    write_index(sharded, index)
    assert "not an index of weights" in refusal(sharded)


def test_an_index_that_leads_out_of_the_folder_is_refused(sharded: Path) -> None:
    write_index(sharded, {"weight_map": {UP: f"../model/{FILE}"}})
    assert "which is not in" in refusal(sharded)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_saved_in_one_dtype_are_served_in_any(tmp_path: Path, saved: torch.dtype, wanted: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**tiny_shape() | {"initializer_range": 0.05})).to(saved)
    assert load_model(write_model(tmp_path, model), dtype=wanted).cache_spec.dtype == getattr(torch, wanted)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("float16", "float16"), ("auto", "auto")],
)
def test_a_dtype_has_a_short_name(given: str, dtype: str) -> None:
    assert parse_arguments(["--model", "somewhere", "--dtype", given]).dtype == dtype


def test_reading_tells_how_far_it_is(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "PROGRESS_S", 0.0)
    with structlog.testing.capture_logs() as lines:
        load_model(llama)
    told = [line for line in lines if line["event"] == "reading weights"]
    sizes = [entry.nbytes for entry in load_file(llama / FILE).values()]
    assert [line["done"] for line in told] == list(range(1, len(sizes) + 1))
    assert [line["total"] for line in told] == [len(sizes)] * len(sizes)
    assert told[-1]["bytes"] == told[-1]["total_bytes"] == sum(sizes)
    assert [line["bytes"] for line in lines if line["event"] == "weights read"] == [sum(sizes)]


# This program prints its peak memory before and after it loads a model. It runs in a separate process.
_MEASURE = """
import sys, torch
from pathlib import Path
from quire_worker.model.loading import load_model
def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM")) << 10
torch.set_num_threads(1)
load_model(sys.argv[1])  # what every first load takes
before = peak()
model = load_model(sys.argv[2], dtype=sys.argv[3])
print(before, peak())
"""


def test_loading_takes_no_more_memory_than_the_weights_and_an_mlp(tmp_path: Path, llama: Path) -> None:
    """A gated MLP is packed for the kernels while the original still exists.

    Matrix products need buffers, but these do not grow with the model.
    """
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LlamaForCausalLM(LlamaConfig(**tiny_shape() | shape | {"head_dim": 64, "initializer_range": 0.02}))
    write_model(tmp_path / "model", model)
    byte_count = 4 * sum(parameter.numel() for parameter in model.parameters())
    mlp: Any = model.model.layers[0].mlp
    mlp_bytes = 4 * sum(parameter.numel() for parameter in mlp.parameters())
    command = [sys.executable, "-c", _MEASURE, str(llama), str(tmp_path / "model"), "float32"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    before, after = map(int, output.stdout.splitlines()[-1].split())
    slack = mlp_bytes + (32 << 20)
    assert byte_count > 3 * slack  # A second copy of the weights would exceed the bound below.
    assert byte_count < after - before < byte_count + slack, (byte_count, after - before)


def test_a_model_folder_with_an_adapter_in_it_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(CheckpointError, match="serve it with --adapter"):
        weight_files(tmp_path)
