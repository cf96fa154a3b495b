"""Checkpoints with a part that fails for one token or one text, and works otherwise.

    poison(folder, token)              the model computes NaN from this input token on
    break_decoder(folder, character)   decoding the token of this single character panics
    break_encoder(folder)              encoding UNENCODABLE panics

The panics are real panics of the compiled tokenizers library. The errors do not derive from `Exception`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# On this text, the regular expression below exceeds the limit of backtracking, so encoding fails.
UNENCODABLE = "a" * 40 + "b"


def poison(folder: Path, token: int) -> None:
    """Sets the embedding of a token to NaN. If embeddings are not tied, the token's logit stays finite."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    weights[name][token] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})


def break_decoder(folder: Path, character: str) -> None:
    """Makes the decoder strip five of this character from the end of each token, even if there are fewer."""

    def change(tokenizer: dict[str, Any]) -> None:
        strip = {"type": "Strip", "content": character, "start": 0, "stop": 5}
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [strip, tokenizer["decoder"]]}

    _change(folder, change)


def break_encoder(folder: Path) -> None:
    """Makes the encoder split at a pattern that needs exponential backtracking for some texts."""

    def change(tokenizer: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": "(?:a+)+$|(a|a)*c"}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}

    _change(folder, change)


def single_character_token(text: Sequence[int], spared: set[int], decode: Callable[[list[int]], str]) -> int | None:
    """Returns the index of a token that is a single printable character and not in `spared`, or None."""
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
