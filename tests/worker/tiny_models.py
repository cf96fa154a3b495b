"""Checkpoints of a few thousand random weights, for tests that need a model but no sense.

    write_tiny_llama(tmp_path / "llama")        GQA 4:2, tied embeddings
    write_tiny_qwen3(tmp_path / "qwen3")        GQA 4:2, normalised queries and keys

The same arguments give the same bytes. Weights are drawn ten times wider than usual, so that logits are far apart and
greedy text depends on every token before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 320
MAX_POSITION = 512
END_OF_TEXT = "<|end|>"  # id 0
_SAMPLE_TEXT = "A quire is a gathering of pages. The pages of a sequence need not lie together. Größe, naïve, 漢字.\n"


def write_tiny_llama(folder: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """Writes a Llama of two layers with a tokenizer, and returns its folder."""
    shape = _shape(heads, kv_heads, head_dim)
    return _write(folder, seed, lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)))


def write_tiny_qwen3(folder: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """Writes a Qwen3 of two layers with a tokenizer, and returns its folder."""
    shape = _shape(heads, kv_heads, head_dim)
    return _write(folder, seed, lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False)))


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE of `VOCABULARY` tokens: any text can be encoded, rare characters byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SAMPLE_TEXT], trainer)
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)


def write_model(folder: Path, model: PreTrainedModel) -> Path:
    """Saves any model, without a tokenizer."""
    model.save_pretrained(folder)
    return folder


def _shape(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITION,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _write(folder: Path, seed: int, build: Callable[[], PreTrainedModel]) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    write_model(folder, model)
    write_tokenizer(folder)
    return folder
