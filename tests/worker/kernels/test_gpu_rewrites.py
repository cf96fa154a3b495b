"""The rewrites for a GPU: replaced parts, logits, and the number of launches of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_kernels.ops.rotate_append import HeadNorms, rotate_append_reference
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.rewrites.on_gpu import MergedLinear, turned
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.worker.engine_harness import reference_model
from tests.worker.tiny_models import write_model

pytestmark = pytest.mark.interpreted

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], Counter[str]]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        Counter(GpuAttentionRewrite=2, GpuGatedMlpRewrite=2, GpuNormRewrite=5, DecoderLayerRewrite=2),
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {},
        Counter(GpuAttentionRewrite=2, GpuGatedMlpRewrite=2, GpuNormRewrite=5, DecoderLayerRewrite=2),
    ),
    "gemma3": (  # Gemma 3's layers have four norms.
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
        Counter(GpuAttentionRewrite=2, GpuGatedMlpRewrite=2, GpuNormRewrite=9),
    ),
}
# These operators launch no kernel. `reshape` only makes a view, because the tensors are dense.
VIEWS = {
    "alias", "_unsafe_view", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select",
    "slice", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view", "_reshape_alias", "unbind",
    "reshape", "chunk",
}  # fmt: skip


@pytest.fixture
def triton_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Returns the device of models on the Triton kernels."""
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return device


def write(name: str, folder: Path) -> Path:
    model_class, config_class, changes, _ = MODELS[name]
    return write_model(folder, model_class(config_class(**SHAPE | changes)))


class Launches(TorchDispatchMode):
    """Records the names of all launches on a GPU, in order: torch's operators and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._in_kernel and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def of_kernels(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Records each kernel as one launch, and hides the interpreter's own tensor operations."""
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def noted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(executor.fn.__name__)
            self._in_kernel = True
            try:
                return run(executor, *args, **kwargs)
            finally:
                self._in_kernel = False

        with monkeypatch.context() as patched:
            patched.setattr(GridExecutor, "__call__", noted)
            yield


def decode(model: PagedModel) -> None:
    """Decodes one token of each of three sequences."""
    groups = len(model.cache_spec.groups)
    cache = KVCache(model.cache_spec, 3 * groups, device=model.device)
    chunks = [Chunk([5], 7, [[3 * group + row] for group in range(groups)], needs_logits=True) for row in range(3)]
    model.forward(build_batch(chunks, groups=model.cache_spec.groups).on(model.device), cache)


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_models_have_the_logits_of_transformers(
    name: str, triton_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(name, tmp_path / "model")
    model = load_model(folder, device=triton_device)
    line = next(line for line in capsys.readouterr().out.splitlines() if "model rewritten" in line)
    counts = dict(part.split("=") for part in line.split() if "=" in part)
    assert {rewrite: int(count) for rewrite, count in counts.items()} == dict(MODELS[name][3])
    tokens = [(7 * place + 3) % 300 for place in range(20)]
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([tokens])).logits[0, [15, -1]]
    cache = KVCache(model.cache_spec, 2 * len(model.cache_spec.groups), device=model.device)
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    groups = model.cache_spec.groups
    tables = [[2 * group, 2 * group + 1] for group in range(len(groups))]
    found = []
    for start, stop in ((0, 16), (16, 19), (19, 20)):  # a prompt, a chunk of three tokens, and a single token
        batch = build_batch([Chunk(tokens[start:stop], start, tables, needs_logits=True)], groups=groups)
        found.append(model.forward(batch.on(model.device), cache)[0].cpu())
    torch.testing.assert_close(torch.stack([found[0], found[-1]]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted in the interpreter")
def test_a_decoding_layer_makes_ten_launches(
    triton_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class, config_class, _, _ = MODELS["llama"]
    folder = write_model(tmp_path / "model", model_class(config_class(**SHAPE)))
    model = load_model(folder, device=triton_device)
    launches = Launches()
    module: Any = model.module
    bounds: list[int] = []
    module.model.layers[1].register_forward_pre_hook(lambda *_: bounds.append(len(launches.names)))
    module.model.layers[1].register_forward_hook(lambda *_: bounds.append(len(launches.names)))
    with launches.of_kernels(monkeypatch), launches:
        decode(model)
    start, stop = bounds
    assert launches.names[start:stop] == [
        "rms_norm_kernel", "linear", "rotate_append_kernel", "decode_paged_kernel", "merge_splits_kernel", "addmm_",
        "rms_norm_kernel", "linear", "gated_activation_kernel", "addmm_",
    ]  # fmt: skip


@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_that_are_turned_one_by_one_are_those_of_one_launch(is_normed: bool, device: torch.device) -> None:
    heads = torch.randn(3, 8, 16, device=device)
    angle = torch.rand(3, 4, device=device)
    tables = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    weights = torch.randn(2, 16, device=device)
    norms = HeadNorms(weights[0], weights[1], 1e-5, 1.0) if is_normed else None
    query, key, value = turned(heads, tables, 4, norms)
    expected = rotate_append_reference(heads, *tables, 2, norms=norms)
    for got, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(value, heads[:, 6:])


def test_products_that_are_merged_add_biases_and_residuals(device: torch.device) -> None:
    first, second = torch.nn.Linear(6, 4, device=device), torch.nn.Linear(6, 2, bias=False, device=device)
    x, residual = torch.randn(1, 3, 6, device=device), torch.randn(1, 3, 6, device=device)
    with torch.inference_mode():
        expected = torch.cat([first(x), second(x)], dim=-1)
        torch.testing.assert_close(MergedLinear(first, second)(x), expected)
        torch.testing.assert_close(MergedLinear(first, second)(x, residual), expected + residual)
        torch.testing.assert_close(MergedLinear(second)(x), second(x))
        added = residual.clone()
        assert MergedLinear(first, second).add_to(added, x).data_ptr() == added.data_ptr()
        torch.testing.assert_close(added, expected + residual)
    assert MergedLinear(second).weight.data_ptr() == second.weight.data_ptr(), "one by itself is not copied"
