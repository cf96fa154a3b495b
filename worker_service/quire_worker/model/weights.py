"""Reading of a checkpoint's weights into memory.

    1. check    the headers of all files: `headers`
    2. read     one tensor at a time, each into its own memory; progress is logged
    3. compare  the tensors that transformers found with the tensors that the configuration requires

Memory holds the weights once, plus the tensors that are being converted. transformers alone would map the files. A
mapping stays as long as one tensor of the file is in use. On a CPU, it would stay forever, although the kernels have
packed copies of all other tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from transformers import modeling_utils
from transformers.utils import logging as transformers_logging

from quire_worker.model.checkpoint import CheckpointError, UnsupportedModelError
from quire_worker.model.headers import TensorEntry, read_headers
from quire_worker.model.transformers_seam import ATTENTION_NAME
from quire_worker.model.unused import check_unused, some

PROGRESS_S = 2.0  # seconds between two lines of the log
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # dtypes of weights that are not quantised
# Options of glibc's `mallopt`, each with the largest value that glibc itself sets in a process that frees much memory.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 64 << 20), (-3, 32 << 20)
_APART_BYTES = 128 << 10
_REASON_CHARACTERS_MAX = 300  # longest part of transformers' message that an error quotes

_log = structlog.get_logger(__name__)


def read_weights(folder: Path, loader: Any, dtype: torch.dtype | str) -> Any:
    """Builds a model and reads its weights.

    Args:
        folder: the checkpoint's folder.
        loader: one of transformers' auto classes.
        dtype: dtype of the weights; "auto" is the dtype in the file.

    Returns:
        A module of transformers on the CPU, for inference.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, unused, or of another shape or kind than the
            configuration requires; the message names file and tensor.
        UnsupportedModelError: the weights are quantised, and transformers cannot load them (mostly because a package
            is missing); or the model is not made for transformers' attention interface.
    """
    entries = read_headers(folder)
    try:
        with _quiet(), _unmapped(_Progress(entries)):
            loaded: Any = loader.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_compare` refuses mismatched tensors by their names in the report.
            )
    except Exception as error:  # each model class of transformers raises its own exceptions
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # the model has its own attention table
            raise UnsupportedModelError("the model does not use transformers' attention interface") from error
        quantised_by = _quantised_by(folder)
        if quantised_by is not None:
            raise UnsupportedModelError(
                f"weights in {folder} are quantized by {quantised_by}, and cannot be loaded here: {_one_line(error)}"
            ) from error
        raise CheckpointError(f"weights in {folder} cannot be loaded: {_one_line(error)}") from error
    module, report = loaded  # the result is a pair because of `output_loading_info`
    _compare(folder, module, report, entries)
    return module.eval()


def _quantised_by(folder: Path) -> str | None:
    """Returns the quantization method in a checkpoint's configuration; None if it is not quantised."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (ValueError, AttributeError, OSError):
        return None
    return str(found.get("quant_method", "an unknown method")) if isinstance(found, dict) else None


def _compare(folder: Path, module: Any, report: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
    """Refuses weights that do not fit the configuration, and unused weights that belong to the computation of text."""
    for name, found, expected in sorted(report["mismatched_keys"], key=lambda each: str(each[0])):
        raise CheckpointError(
            f"weights in {_file_of(folder, entries, name)} do not fit {folder / 'config.json'}: tensor {name:.200} "
            f"is {list(found)}, but the configuration needs {list(expected)}"
        )
    if report["missing_keys"]:
        files = sorted({entry.file for entry in entries.values()})
        raise CheckpointError(f"weights in {folder} ({some(files)}) lack {some(report['missing_keys'])}")
    is_quantised = getattr(module.config, "quantization_config", None) is not None
    for name, parameter in module.named_parameters():
        entry = entries.get(name)
        if entry is None or is_quantised or not parameter.is_floating_point() or entry.dtype in _FLOATS:
            continue
        raise CheckpointError(
            f"weights in {entry.file} cannot be served: tensor {name:.200} is {entry.dtype}, but config.json has no "
            f"quantization_config; without one it must be one of {', '.join(sorted(_FLOATS))}"
        )
    check_unused(folder, module, report["unexpected_keys"], entries)


def _file_of(folder: Path, entries: Mapping[str, TensorEntry], name: str) -> str:
    """Returns the name of the file that has a tensor.

    Returns the folder if transformers merged the tensor from several or renamed it.
    """
    return entries[name].file if name in entries else str(folder)


class _Progress:
    """Logs how much of a checkpoint has been read, at most every `PROGRESS_S`, and when the reading is complete."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._byte_counts = {name: entry.byte_count for name, entry in entries.items()}
        self._total_bytes = sum(self._byte_counts.values())
        self._bytes = self._count = 0
        self._lock = threading.Lock()  # transformers reads with several threads
        self._started_s = self._said_s = time.monotonic()

    def note(self, name: str) -> None:
        """Counts a tensor that was read."""
        with self._lock:
            self._count += 1
            self._bytes += self._byte_counts.get(name, 0)
            now_s = time.monotonic()
            if now_s - self._said_s >= PROGRESS_S:
                self._said_s = now_s
                _log.info(
                    "reading weights",
                    done=self._count, total=len(self._byte_counts), bytes=self._bytes, total_bytes=self._total_bytes,
                )  # fmt: skip

    def end(self) -> None:
        """Logs the totals at the end."""
        seconds = round(time.monotonic() - self._started_s, 1)
        _log.info("weights read", tensors=self._count, bytes=self._bytes, seconds=seconds)


class _File:
    """Replaces the open file that transformers reads tensors from."""

    def __init__(self, path: str | os.PathLike[str], progress: _Progress) -> None:
        self._inner: Any = safe_open(path, framework="pt", backend="pread")
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)

    def get_slice(self, name: str) -> _TensorSlice:
        """Returns an object that reads the tensor when it is indexed."""
        return _TensorSlice(self._inner.get_slice(name), name, self._progress)


class _TensorSlice:
    """Replaces safetensors' slice: a tensor that is read when it is indexed."""

    def __init__(self, inner: Any, name: str, progress: _Progress) -> None:
        self._inner = inner
        self._name = name
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._inner[index]
        self._progress.note(self._name)
        return tensor


@contextmanager
def _unmapped(progress: _Progress) -> Iterator[None]:
    """Makes transformers read files instead of mapping them."""
    seam: Any = modeling_utils
    opened = seam.safe_open
    seam.safe_open = lambda path, **_: _File(path, progress)
    try:
        yield
        progress.end()
    finally:
        seam.safe_open = opened


@contextmanager
def large_tensors_apart() -> Iterator[None]:
    """Returns freed memory to the system at once, for as long as the context lasts.

    While a model is loaded, each weight is read, converted, packed for kernels and freed. glibc adapts to that by
    keeping freed pieces of up to 32 MiB between the memory in use. These pieces took a quarter of the weights.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD[0], _APART_BYTES)
    try:
        yield
    finally:
        for option, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            libc.mallopt(option, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Switches off transformers' progress bars and its table of mismatched tensors.

    The bars and the table would appear between the lines of the log. The report has the same information.
    """
    bars: Any = transformers_logging
    shown, verbosity = bars.is_progress_bar_enabled(), bars.get_verbosity()
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    try:
        yield
    finally:
        bars.set_verbosity(verbosity)
        if shown:
            bars.enable_progress_bar()


def _one_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_REASON_CHARACTERS_MAX] if lines else type(error).__name__
