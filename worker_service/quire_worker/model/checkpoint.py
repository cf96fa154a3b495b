"""A model's folder: its files of weights, and its fingerprint.

The worker reads only `config.json`, safetensors files, and the other files that transformers reads with them
(tokenizer, generation defaults). The worker never loads a pickle, downloads a file or runs the checkpoint's own code.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SAMPLE_BYTES = 1024 * 1024
_CONFIG = "config.json"
_ID_PARTS = 2  # a model's id at Hugging Face has two parts: owner and name
# Any one of these files is enough: transformers converts the older formats to a fast tokenizer.
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tokenizer_config.json"),
)
_VOCABULARIES = (*_TOKENIZERS[:-1], "*.model", "*.tiktoken", "tekken.json")  # tokenizer_config.json needs one of these
_ADAPTER = "adapter_config.json"
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"


class ModelError(Exception):
    """A model cannot be served. The message is for the person who chose the model."""


class CheckpointError(ModelError):
    """A file of the model's folder is missing or damaged, or does not fit the other files."""


class UnsupportedModelError(ModelError):
    """The model has a part that cannot be served from pages (yet). The message names the part."""


def check_folder(folder: Path) -> None:
    """Checks that the folder has all files of a model, in the order in which they are read.

    Raises:
        CheckpointError: a file is missing, or `config.json` is not a configuration. The message says how to fix it.
    """
    if not folder.is_dir():
        is_id = len(folder.parts) == _ID_PARTS and not folder.is_absolute()
        get = f"; if it is a model id of Hugging Face, download it first: hf download {folder} --local-dir FOLDER"
        raise CheckpointError(f"there is no folder {folder}{get if is_id else ''}")
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"there is no {_CONFIG} in {folder}")
    try:
        is_object = isinstance(json.loads((folder / _CONFIG).read_bytes()), dict)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / _CONFIG} is not JSON: {error}") from None
    if not is_object:
        raise CheckpointError(f"{folder / _CONFIG} is not a JSON object")
    if has_tokenizer(folder) and not any(any(folder.glob(name)) for name in _VOCABULARIES):
        raise CheckpointError(
            f"no usable tokenizer in {folder}: it has {_TOKENIZERS[-1]}, but no {_TOKENIZERS[0]}; add that, or "
            f"remove {_TOKENIZERS[-1]} to serve only token ids"
        )
    weight_files(folder)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether the folder has a file of any tokenizer. Without one, callers have to send token ids."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def attention_chunk_of(folder: Path) -> int:
    """Returns the tokens of an attention chunk (Llama 4); 0 if the model has none, or the configuration is unreadable.

    The block size must divide this number.
    """
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        size = config.get("text_config", config).get("attention_chunk_size")
    except (OSError, ValueError, RecursionError, AttributeError):
        return 0
    return size if isinstance(size, int) and size > 0 else 0


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold the weights, sorted by name.

    Raises:
        CheckpointError: the folder, `config.json` or a file of weights is missing, the index of a sharded checkpoint
            cannot be read, or the folder also holds an adapter.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"there is no {_CONFIG} in {folder}")
    if (folder / _ADAPTER).exists():
        raise CheckpointError(
            f"{folder} has an {_ADAPTER}, so transformers would load the adapter or the model that it names; move "
            "the adapter to its own folder, and serve it with --adapter"
        )
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _WEIGHTS_INDEX).is_file():
        raise CheckpointError(f"neither {_WEIGHTS} nor {_WEIGHTS_INDEX} in {folder}: only safetensors are supported")
    places, there = places_of_weights(folder), {path.name for path in folder.iterdir() if path.is_file()}
    for tensor, name in places.items():
        if name not in there:
            raise CheckpointError(
                f"{_WEIGHTS_INDEX} names {name!r:.200} for tensor {tensor:.200}, which is not in {folder}"
            )
    return [folder / name for name in sorted(set(places.values()))]


def places_of_weights(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor, from the index of a sharded checkpoint; empty if all are in one file.

    Raises:
        CheckpointError: the index cannot be read.
    """
    if (folder / _WEIGHTS).is_file():
        return {}
    try:
        places = json.loads((folder / _WEIGHTS_INDEX).read_bytes())["weight_map"]
        if not places or not all(isinstance(name, str) for name in places.values()):
            raise TypeError("its weight_map must map tensors to files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / _WEIGHTS_INDEX} is not an index of weights: {error!r:.200}") from error
    return dict(places)


def fingerprint(folder: Path | str) -> bytes:
    """Returns a checkpoint's fingerprint, so that only workers with equal checkpoints exchange prefixes.

        SHA256("quire/model/1" | field(config.json) | per file of weights, by name:
               field(name) | uint64 size | field(its first MiB) | field(its last MiB))

    Here field(x) is the length of x as uint64, followed by x. Numbers are little-endian. Weights are sampled, because
    reading all of a large model would take minutes. Two checkpoints have the same fingerprint if they differ only in
    the middle of files of equal size. In practice that does not occur, because other weights also change the first MiB,
    which holds the header and the first tensors. A file's path and modification time do not matter.

    Returns:
        32 bytes.

    Raises:
        CheckpointError: see `weight_files`.
    """
    folder = Path(folder)
    files = weight_files(folder)
    state = hashlib.sha256(b"quire/model/1")
    state.update(_field((folder / _CONFIG).read_bytes()))
    for path in files:
        size = path.stat().st_size
        state.update(_field(path.name.encode()) + size.to_bytes(8, "little"))
        with path.open("rb") as file:
            state.update(_field(file.read(_SAMPLE_BYTES)))
            file.seek(max(0, size - _SAMPLE_BYTES))
            state.update(_field(file.read(_SAMPLE_BYTES)))
    return state.digest()


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
