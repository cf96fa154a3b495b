"""Checkpoints with a part that fails at one token or one text, and is in order otherwise.

    poison(folder, token)              the model gives NaN from this input token on
    break_decoder(folder, character)   decoding the token of this single character panics
    break_encoder(folder)              encoding UNENCODABLE panics

The panics are real ones of the compiled tokenizers library, which are no `Exception`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

UNENCODABLE = "a" * 40 + "b"  # more backtracking than the regular expression below may do


def poison(folder: Path, token: int) -> None:
    """The embedding of a token is NaN. Its logit is not, where embeddings are not tied."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    weights[name][token] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})


def break_decoder(folder: Path, character: str) -> None:
    """Strips five of this character from the end of each token without asking whether there are as many."""

    def change(tokenizer: dict[str, Any]) -> None:
        strip = {"type": "Strip", "content": character, "start": 0, "stop": 5}
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [strip, tokenizer["decoder"]]}

    _change(folder, change)


def break_encoder(folder: Path) -> None:
    """Splits at a pattern that some texts can be matched with in exponentially many ways."""

    def change(tokenizer: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": "(?:a+)+$|(a|a)*c"}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}

    _change(folder, change)


def single_character_token(text: Sequence[int], spared: set[int], decode: Callable[[list[int]], str]) -> int | None:
    """Returns a place in a text where one printable character is a token of its own, and not one of the spared ones."""
    for place, token in enumerate(text):
        piece = decode([token])
        if token not in spared and len(piece) == 1 and piece.isascii() and piece > " ":
            return place
    return None


def _change(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))
