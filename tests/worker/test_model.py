"""Models on pages, compared with transformers' own logits and greedy text."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.attention import TorchPagedAttention
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.model import loading as model_file
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import CheckpointError, UnsupportedModelError, fingerprint
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.transformers_seam import ProbeStep, paged_attention_forward
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.worker.tiny_models import VOCABULARY, write_model, write_tiny_llama, write_tiny_qwen3

DEMO = Path(__file__).parents[2] / "models" / "demo"
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 300]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "demo": DEMO,
        "llama": write_tiny_llama(root / "llama"),
        "llama of 7 to 1": write_tiny_llama(root / "llama7", heads=7, kv_heads=1),
        "qwen3": write_tiny_qwen3(root / "qwen3"),
        "qwen3 of 10 to 2": write_tiny_qwen3(root / "qwen3_10", heads=10, kv_heads=2),
        "qwen3 of 3 to 3": write_tiny_qwen3(root / "qwen3_3", heads=3, kv_heads=3),
    }


NAMES = ["demo", "llama", "llama of 7 to 1", "qwen3", "qwen3 of 10 to 2", "qwen3 of 3 to 3"]


@cache
def own_model(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def own_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Returns transformers' logits of every position, `[tokens, vocabulary]`."""
    with torch.inference_mode():
        logits: torch.Tensor = own_model(folder)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def own_greedy_text(folder: Path, prompt: list[int], token_count: int) -> list[int]:
    output = own_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=token_count, min_new_tokens=token_count, do_sample=False
    )
    text: list[int] = output[0, len(prompt) :].tolist()
    return text


def random_prompt(length: int, *, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1, vocabulary) for _ in range(length)]


class Bench:
    """A model, and sequences on scattered blocks of a pool; unwritten slots are NaN."""

    def __init__(self, folder: Path, *, block_size: int = 16, token_count: int = 2000) -> None:
        self.model: PagedModel = load_model(folder, block_size=block_size)
        self.cache = KVCache(self.model.cache_spec, token_count // block_size)
        for buffer in self.cache.buffers:
            buffer.fill_(NAN_BYTE)
        self.free = list(range(self.cache.block_count))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, work: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Computes the next tokens of sequences in one pass; returns each sequence's last logits, `[vocabulary]`."""
        chunks = []
        for sequence, tokens in work.items():
            start = self.lengths.get(sequence, 0)
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.model.cache_spec.block_size < start + len(tokens):
                table.append(self.free.pop())
            self.lengths[sequence] = start + len(tokens)
            chunks.append(Chunk(tokens, start, [table], needs_logits=True))
        batch = build_batch(chunks, groups=self.model.cache_spec.groups)
        return dict(zip(work, self.model.forward(batch, self.cache), strict=True))


def assert_logits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # The tolerance allows for rounding: both sides round in every layer, in different orders, so neither is exact.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_whole_prompts_in_one_batch_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    bench = Bench(folders[name])
    prompts = {length: random_prompt(length, seed=length) for length in LENGTHS}
    for length, logits in bench.step(prompts).items():
        assert_logits_equal(logits, own_logits(folders[name], prompts[length])[-1])


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_mixed_with_decode_equals_transformers_at_every_step(
    folders: dict[str, Path], name: str
) -> None:
    """Sequences arrive at different steps, are cut into random chunks, and decode single tokens at the end."""
    bench = Bench(folders[name])
    choose = random.Random(name)
    texts = {sequence: random_prompt(choose.choice([40, 90]), seed=sequence) for sequence in range(5)}
    expected = {sequence: own_logits(folders[name], text) for sequence, text in texts.items()}
    done = dict.fromkeys(texts, 0)
    while any(done[sequence] < len(text) for sequence, text in texts.items()):
        work = {}
        for sequence, text in texts.items():
            if done[sequence] < len(text) and choose.random() < 0.8:
                length = choose.choice([1, 1, 16, 7]) if done[sequence] < len(text) - 8 else 1
                work[sequence] = text[done[sequence] : done[sequence] + length]
                done[sequence] += len(work[sequence])
        for sequence, logits in bench.step(work).items() if work else ():
            assert_logits_equal(logits, expected[sequence][done[sequence] - 1])


@pytest.mark.parametrize(("name", "block_size"), [("demo", 16), ("llama", 1), ("qwen3", 16), ("qwen3 of 10 to 2", 5)])
def test_greedy_text_equals_that_of_generate(folders: dict[str, Path], name: str, block_size: int) -> None:
    bench = Bench(folders[name], block_size=block_size)
    prompts = {length: random_prompt(length, seed=length + 1) for length in (1, 16, 33, 120)}
    logits = bench.step(prompts)
    text: dict[int, list[int]] = {length: [] for length in prompts}
    for _ in range(24):
        for length, row in logits.items():
            text[length].append(1 + int(row[1:].argmax()))  # skips token 0, end-of-text, as `min_new_tokens` does
        logits = bench.step({length: text[length][-1:] for length in prompts})
    for length, prompt in prompts.items():
        assert text[length] == own_greedy_text(folders[name], prompt, 24)


def test_a_batch_in_which_nobody_needs_logits_gives_none_but_writes_its_pages(folders: dict[str, Path]) -> None:
    bench = Bench(folders["llama"])
    prompt = random_prompt(20, seed=1)
    batch = build_batch([Chunk(prompt[:19], 0, [[4, 2]], needs_logits=False)], groups=bench.model.cache_spec.groups)
    assert bench.model.forward(batch, bench.cache).shape == (0, VOCABULARY)
    batch = build_batch([Chunk(prompt[19:], 19, [[4, 2]], needs_logits=True)], groups=bench.model.cache_spec.groups)
    assert_logits_equal(bench.model.forward(batch, bench.cache)[0], own_logits(folders["llama"], prompt)[-1])


def test_a_sequence_goes_on_from_copied_blocks(folders: dict[str, Path]) -> None:
    bench = Bench(folders["qwen3"])
    prompt = random_prompt(20, seed=2)
    bench.step({0: prompt})
    copy = bench.free.pop()
    bench.model.attention.copy_blocks(bench.cache.buffers, [bench.tables[0][1]], [copy])
    bench.tables[1], bench.lengths[1] = [bench.tables[0][0], copy], 20
    logits = bench.step({0: [5], 1: [9]})
    assert_logits_equal(logits[0], own_logits(folders["qwen3"], [*prompt, 5])[-1])
    assert_logits_equal(logits[1], own_logits(folders["qwen3"], [*prompt, 9])[-1])


def test_running_twice_gives_the_same_bits(folders: dict[str, Path]) -> None:
    work = {0: random_prompt(33, seed=1), 1: random_prompt(7, seed=2)}
    first, second = (Bench(folders["demo"]).step(work) for _ in range(2))
    assert all(torch.equal(first[sequence], second[sequence]) for sequence in work)


def test_a_model_tells_what_the_worker_needs_to_know(folders: dict[str, Path]) -> None:
    demo = load_model(folders["demo"])
    assert (demo.vocab_size, demo.max_position, demo.eos_token_ids) == (2048, 4096, frozenset({0}))
    assert demo.architecture == "LlamaForCausalLM"
    assert demo.cache_spec.layout == "nhd full_attention[0,1,2,3] heads=2x64 block=16 buffers=4 dtype=float32"
    assert demo.fingerprint == fingerprint(folders["demo"])


def test_bfloat16_runs_with_pages_of_bfloat16_close_to_float32(folders: dict[str, Path]) -> None:
    half = load_model(folders["demo"], dtype="bfloat16")
    assert half.cache_spec.dtype == torch.bfloat16
    prompt = random_prompt(33, seed=4)
    batch = build_batch([Chunk(prompt, 0, [range(3)], needs_logits=True)], groups=half.cache_spec.groups)
    logits = half.forward(batch, KVCache(half.cache_spec, 3))[0]
    expected = own_logits(folders["demo"], prompt)[-1]
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_end_of_text_may_be_several_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 17]}))
    assert load_model(folder).eos_token_ids == {0, 17}


def change_config(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "lacks 'sliding_window'"),
        (
            {"layer_types": ["full_attention", "compressed_sparse_attention"]},
            "'compressed_sparse_attention' is unknown",
        ),
        ({"sliding_window": 64, "layer_types": None}, "sliding window of 64, but it passes 'sliding_window' = None"),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, "kv_lora_rank"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"attention_chunk_size": 32}, "attention_chunk_size = 32"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, entries: dict[str, object], named: str
) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    change_config(folder, **entries)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(folder)


def test_a_model_with_learned_positions_is_served(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=48, initializer_range=0.2)
    folder = write_model(tmp_path, GPT2LMHeadModel(config))
    bench = Bench(folder)
    prompt = random_prompt(40, seed=3, vocabulary=64)
    bench.step({0: prompt[:25]})
    assert_logits_equal(bench.step({0: prompt[25:]})[0], own_logits(folder, prompt)[-1])
    assert bench.model.max_position == 48


def call_attention(**options: object) -> torch.Tensor:
    class Layer(torch.nn.Module):
        layer_idx = 0

    heads = torch.zeros(1, 2, 3, 4)
    step = ProbeStep(build_batch([Chunk([0, 0, 0], 0, [], needs_logits=True)], groups=[]))
    known: dict[str, Any] = {"attention_mask": None, "quire_step": step}
    return paged_attention_forward(Layer(), heads, heads, heads, **(known | options))[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.zeros(3, 3)),
        ("position_bias", torch.zeros(3, 3)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("output_attentions", True),
        ("anything_new", 0),
    ],
)
def test_an_option_of_attention_that_would_be_dropped_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        call_attention(**{name: value})


def test_options_that_ask_for_nothing_are_accepted() -> None:
    output = call_attention(
        sliding_window=None, softcap=None, use_cache=False, is_causal=True, position_ids=torch.zeros(1, 3), dropout=0.0
    )
    assert output.shape == (1, 3, 2, 4)


def test_a_layer_that_drops_the_step_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="keyword arguments"):
        call_attention(quire_step=None)


class ForgetfulAttention(TorchPagedAttention):
    """Reads a sequence's last page instead of its first, as if state had been lost."""

    def plan(self, batch: Any, spec: Any) -> Any:
        plan = super().plan(batch, spec)
        for unit in plan.work().units:
            if 1 < unit.query_length < unit.keys.stop:
                unit.key_pages[0] = unit.key_pages[-1]
        return plan


def test_a_model_whose_logits_through_pages_differ_from_its_own_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "backend_for", lambda device: ForgetfulAttention())
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        load_model(folders["llama"])


def remove_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def index_without_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "no folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: change_config(folder, model_type="no-such-model"), "no-such-model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "only safetensors"),
        (lambda folder: change_config(folder, intermediate_size=48), "weights"),
        (lambda folder: change_config(folder, num_hidden_layers=3), "lack model.layers.2"),
        (remove_tensor, "lack model.layers.1.mlp.up_proj.weight"),
        (cut_weights, "cannot be loaded"),
        (index_without_shard, "model-00001-of-00001.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)


def test_sharded_weights_are_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    own_model(folders["llama"]).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    bench = Bench(tmp_path)
    prompt = random_prompt(9, seed=1)
    assert_logits_equal(bench.step({0: prompt})[0], own_logits(folders["llama"], prompt)[-1])


def test_unknown_dtypes_and_devices_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="'float8'"):
        load_model(folders["llama"], dtype="float8")
    with pytest.raises(ValueError, match="'meta'"):
        load_model(folders["llama"], device="meta")


def test_a_fingerprint_follows_the_content_and_not_the_place(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(folders["llama"], tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folders["llama"])
    assert len(fingerprint(copy)) == 32
    (copy / "README.md").write_text("not part of the model")
    assert fingerprint(copy) == fingerprint(folders["llama"])
    seen = {fingerprint(copy)}
    change_config(copy, rms_norm_eps=1e-5)
    seen.add(fingerprint(copy))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    seen.add(fingerprint(copy))
    assert len(seen) == 3


def test_the_same_seed_writes_the_same_tiny_model(folders: dict[str, Path], tmp_path: Path) -> None:
    assert fingerprint(write_tiny_qwen3(tmp_path / "again")) == fingerprint(folders["qwen3"])
    assert fingerprint(write_tiny_qwen3(tmp_path / "other", seed=1)) != fingerprint(folders["qwen3"])
