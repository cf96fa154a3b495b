"""The rewrites that put kernels into a loaded model: which modules are replaced, and that none is replaced twice."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from quire_worker.attention import TorchPagedAttention
from quire_worker.cache import KVCache
from quire_worker.model import loading
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.rewrites import devices, rewriter
from quire_worker.model.rewrites.decoder import Decoder
from quire_worker.model.rewrites.decoder_layer import DecoderLayer
from quire_worker.model.rewrites.gated_mlp import GatedMlp, GatedMlpRewrite
from quire_worker.model.rewrites.linear import Linear, LinearRewrite
from quire_worker.model.rewrites.norm import Norm, NormRewrite
from quire_worker.model.rewrites.recording import RecordedCall
from quire_worker.model.rewrites.rewriter import Rewritten, agrees
from quire_worker.model.rewrites.rotary_tables import POSITIONS_MAX, RotaryTables
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.worker.attention_batches import implementation
from tests.worker.tiny_models import write_model

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TIED: dict[str, Any] = {**SHAPE, "tie_word_embeddings": True}
LAYERS = Counter(
    AttentionRewrite=2, GatedMlpRewrite=2, NormRewrite=5, DecoderLayerRewrite=2, DecoderRewrite=1, TextModelRewrite=1
)
WITHOUT_ATTENTION = Counter(GatedMlpRewrite=2, NormRewrite=5, LinearRewrite=9)
LATE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 32,
}

# Family -> the family's model, and how often each rewrite must apply to this model.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Counter[str]]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)), LAYERS + Counter(LinearRewrite=1)),
    "llama, tied": (lambda: LlamaForCausalLM(LlamaConfig(**TIED)), LAYERS + Counter(TiedHead=1)),
    "llama, biases": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
        LAYERS + Counter(LinearRewrite=1),
    ),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
        LAYERS + Counter(LinearRewrite=1),
    ),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)), LAYERS + Counter(LinearRewrite=1)),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**TIED)), LAYERS + Counter(TiedHead=1)),
    "mistral, window": (
        lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=24)),
        LAYERS + Counter(LinearRewrite=1),
    ),
    "qwen2, one layer with a window": (
        lambda: Qwen2ForCausalLM(
            Qwen2Config(
                **SHAPE, use_sliding_window=True, sliding_window=24, layer_types=["full_attention", "sliding_attention"]
            )
        ),
        LAYERS + Counter(LinearRewrite=1),
    ),
    # From position 32 on, Ministral's queries have a temperature. Modules are compared on fewer tokens, so the
    # temperature has no effect.
    "ministral": (lambda: Ministral3ForCausalLM(Ministral3Config(**SHAPE, rope_parameters=LATE)), WITHOUT_ATTENTION),
    # OLMo clips elements of queries and keys, but none of these elements reaches the limit.
    "olmo": (
        lambda: OlmoForCausalLM(OlmoConfig(**SHAPE, clip_qkv=1000.0)),
        WITHOUT_ATTENTION - Counter(NormRewrite=5),
    ),
    # Gemma's activation is an approximate GELU, and its norms multiply by 1 + weight. Gemma's embedding is scaled, so
    # the embedding and the head that shares its weights are not replaced.
    "gemma": (lambda: GemmaForCausalLM(GemmaConfig(**TIED)), LAYERS),
    # This model's activation is the exact GELU, so its MLPs and decoder layers are not replaced. The three products of
    # each MLP are packed separately.
    "llama, exact gelu": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")),
        Counter(AttentionRewrite=2, LinearRewrite=7, NormRewrite=5),
    ),
    # Before any lookup, Llama 4 reads the device of its embedding's weight.
    "llama4, tied": (
        lambda: Llama4ForCausalLM(Llama4TextConfig(**TIED, num_local_experts=2, intermediate_size_mlp=96)),
        Counter(TiedHead=1, NormRewrite=5, LinearRewrite=12),
    ),
    # GPT-2's layers use `Conv1D`, which no rewrite supports.
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)),
        Counter(TiedHead=1),
    ),
}


@pytest.fixture(autouse=True)
def needs_the_kernels() -> None:
    """Skips the test if the CPU kernels can neither be found nor compiled."""
    implementation("cpu", torch.device("cpu"))


def folder_of(family: str, tmp_path: Path) -> Path:
    """Writes a checkpoint with random norms and biases. Initially all norms are 1 and all biases 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family][0]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
                    assert "norm" in name or "bias" in name or "ln_" in name
    return write_model(tmp_path / "model", model)


def load_counted(folder: Path, **options: str) -> tuple[PagedModel, Counter[str]]:
    """Loads a model, and returns it with the number of each rewrite."""
    found: list[Counter[str]] = []

    def count(*arguments: Any) -> Rewritten:
        done = rewriter.rewrite(*arguments)
        found.append(done.counts)
        return done

    with mock.patch.object(devices, "rewrite", count):
        model = load_model(folder, **options)
    (counts,) = found
    return model, counts


def logits_of(model: PagedModel) -> torch.Tensor:
    """Returns the logits of a chunk, and of a prompt in one pass with a decoding sequence."""
    groups = model.cache_spec.groups
    cache = KVCache(model.cache_spec, 16 * len(groups))
    tables, others = ([range(start, start + 4) for start in range(first, 16 * len(groups), 16)] for first in (0, 8))
    first = [Chunk(list(range(3, 40)), 0, tables, needs_logits=True)]
    second = [
        Chunk([7], 37, tables, needs_logits=True),
        Chunk(list(range(200, 250)), 0, others, needs_logits=True),
    ]
    return torch.cat([model.forward(build_batch(chunks, groups=groups), cache) for chunks in (first, second)])


def load_untouched(folder: Path, **options: str) -> PagedModel:
    """Loads the model without the kernels."""
    with mock.patch.object(loading, "backend_for", return_value=TorchPagedAttention()):
        return load_model(folder, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rewritten_as_far_as_it_fits_and_keeps_its_logits(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    model, counts = load_counted(folder)
    assert counts == FAMILIES[family][1]
    # The tolerance allows for rounding: both sides round in every layer, in different orders.
    torch.testing.assert_close(logits_of(model), logits_of(load_untouched(folder)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama, tied", "qwen3", "llama, biases"])
def test_in_bfloat16_logits_are_as_near_to_float32_as_the_models_own(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    exact = logits_of(load_untouched(folder))
    model, counts = load_counted(folder, dtype="bfloat16")
    assert counts == FAMILIES[family][1]
    ours, own = (
        ((logits - exact).norm() / exact.norm()).item()
        for logits in (logits_of(model), logits_of(load_untouched(folder, dtype="bfloat16")))
    )
    assert ours < 1.2 * own


ALL_IN_ONE_CALL = ["llama, biases", "gemma", "qwen3", "mistral, window", "qwen2, one layer with a window"]


@pytest.mark.parametrize("family", ALL_IN_ONE_CALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(dtype: str, family: str, tmp_path: Path) -> None:
    model = load_model(folder_of(family, tmp_path), dtype=dtype)
    (decoder,) = (part for part in model.module.modules() if isinstance(part, Decoder))
    at_once = logits_of(model)
    with mock.patch.object(DecoderLayer, "forward", side_effect=AssertionError):
        assert torch.equal(logits_of(model), at_once)
    with mock.patch.object(decoder, "_in_c", None):
        assert torch.equal(logits_of(model), at_once)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_some_tokens_are_the_bits_of_those_among_all(dtype: str, tmp_path: Path) -> None:
    """After its attention, the last layer computes only the tokens whose logits are needed."""
    model = load_model(folder_of("llama, biases", tmp_path), dtype=dtype)
    cache = KVCache(model.cache_spec, 12)
    last, none, each = (
        Chunk(list(range(first, first + 40)), 0, [range(blocks, blocks + 4)], needs_logits=True)
        for first, blocks in ((3, 0), (50, 4), (90, 8))
    )
    some = [last, replace(none, needs_logits=False), replace(each, needs_all_logits=True)]
    every = [replace(chunk, needs_all_logits=True) for chunk in (last, none, each)]
    of_some, of_every = (
        model.forward(build_batch(chunks, groups=model.cache_spec.groups), cache) for chunks in (some, every)
    )
    assert torch.equal(of_some, torch.cat([of_every[39:40], of_every[80:]]))
    nobody = [replace(last, needs_logits=False)]
    assert model.forward(build_batch(nobody, groups=model.cache_spec.groups), cache).shape[0] == 0


def test_turns_are_looked_up_where_they_follow_the_position_alone(tmp_path: Path) -> None:
    module = load_untouched(folder_of("llama", tmp_path)).module.model.rotary_emb
    hidden = torch.zeros(1, 1, 64)

    def asked_anew(positions: list[int]) -> bool:
        position_ids = torch.tensor([positions])
        turns = tables.turns(hidden, position_ids)
        for found, wanted in zip(turns.of_tokens, module(hidden, position_ids=position_ids), strict=True):
            assert torch.equal(found, wanted)
        return turns.positions is None

    tables = RotaryTables(module)
    assert not asked_anew([0, 5, 1023])
    assert not asked_anew([3000, 7])
    assert asked_anew([POSITIONS_MAX, 7])
    assert not asked_anew([POSITIONS_MAX - 1, 7])
    module.rope_type = "dynamic"
    tables = RotaryTables(module)
    assert asked_anew([0, 5])


def test_several_threads_give_the_bits_of_one(tmp_path: Path) -> None:
    model = load_model(folder_of("llama", tmp_path))
    before, one = torch.get_num_threads(), logits_of(model)
    try:
        torch.set_num_threads(before + 2)
        assert torch.equal(logits_of(model), one)
    finally:
        torch.set_num_threads(before)


def tensor_bytes(module: torch.nn.Module) -> int:
    """Returns the bytes of all storages that are reachable from a module."""
    found: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    for part in module.modules():
        for value in [*part.parameters(recurse=False), *part.buffers(recurse=False), *vars(part).values()]:
            add(value)
            for inner in (getattr(value, name, None) for name in ("weight", "bias", "query", "key")):
                add(inner)
    return sum(found.values())


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen3"])
def test_no_weight_is_there_twice(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    replaced: list[weakref.ref[torch.Tensor]] = []
    original = rewriter.rewrite

    def watch(module: torch.nn.Module, *arguments: Any) -> Rewritten:
        replaced.extend(weakref.ref(part.weight) for part in module.modules() if type(part) is torch.nn.Linear)
        return original(module, *arguments)

    with mock.patch.object(devices, "rewrite", watch):
        model = load_model(folder)
    gc.collect()
    assert replaced
    assert not [weight for weight in replaced if weight() is not None]
    panels = 1.25  # panels have 64 columns, so up to a quarter of a tiny model's weight is padding
    assert tensor_bytes(model.module) < panels * tensor_bytes(load_untouched(folder).module)


def call_of(module: torch.nn.Module, *arguments: torch.Tensor) -> RecordedCall:
    with torch.inference_mode():
        return RecordedCall(arguments, {}, module(*arguments))


def test_a_replacement_that_computes_something_else_is_not_kept() -> None:
    library = implementation("cpu", torch.device("cpu")).library  # type: ignore[attr-defined]
    x = torch.randn(3, 16)
    layer_norm = torch.nn.LayerNorm(16, eps=1e-5, bias=False)
    candidates = list(NormRewrite(library).candidates(layer_norm))
    assert [type(candidate) for candidate in candidates] == [Norm, Norm]
    assert not any(agrees(candidate, call_of(layer_norm, x)) for candidate in candidates)

    class Gated(torch.nn.Module):
        def __init__(self, act_fn: torch.nn.Module) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(16, 24), torch.nn.Linear(16, 24)
            self.down_proj, self.act_fn = torch.nn.Linear(24, 16), act_fn

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    approximated = torch.nn.GELU(approximate="tanh")
    for act_fn, are_equal in (
        (torch.nn.SiLU(), [True, False]),
        (approximated, [False, True]),
        (torch.nn.GELU(), [False, False]),
    ):
        module = Gated(act_fn)
        found = list(GatedMlpRewrite(library).candidates(module))
        assert [type(candidate) for candidate in found] == [GatedMlp, GatedMlp]
        assert [agrees(candidate, call_of(module, x)) for candidate in found] == are_equal


def test_a_weight_that_something_else_shares_and_a_kind_of_linear_layer_are_left_alone() -> None:
    library = implementation("cpu", torch.device("cpu")).library  # type: ignore[attr-defined]

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    layer = torch.nn.Linear(16, 8)
    assert [type(found) for found in LinearRewrite(library, set()).candidates(layer)] == [Linear]
    assert not list(LinearRewrite(library, {layer.weight.data_ptr()}).candidates(layer))
    assert not list(LinearRewrite(library, set()).candidates(Scaled(16, 8)))


def test_a_model_whose_logits_change_is_refused(tmp_path: Path) -> None:
    def spoil(module: Any, *_: Any) -> Rewritten:
        with torch.no_grad():
            module.model.norm.weight[:32] = 0
        return Rewritten(module, Counter())

    with (
        mock.patch.object(devices, "rewrite", spoil),
        pytest.raises(UnsupportedModelError, match="logits differ"),
    ):
        load_model(folder_of("llama", tmp_path))
