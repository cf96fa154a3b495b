"""A transformers model, run on pages.

transformers is the model zoo: it builds the layers and reads the weights. Its attention calls a function chosen by name,
and `quire_paged` is ours. What a forward pass needs comes in the keyword argument `quire_step`, which transformers hands
through every layer untouched, so nothing is global:

    PagedModel.forward -> module(..., quire_step=step) -> each layer -> paged_attention_forward -> step.attend

No mask function is registered under that name, so transformers leaves `attention_mask` None; no cache is passed, so keys
and values arrive for the new tokens only. These are seams inside transformers, which is why `load_model` ends with a
check: the model must give the same logits through its own attention and through pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from quire_worker.attention import AttentionPlan, PagedAttention, backend_for
from quire_worker.batch import Chunk, ForwardBatch, build_batch
from quire_worker.cache import CacheSpec, KVCache
from quire_worker.checkpoint import CheckpointError, UnsupportedModelError, fingerprint, weight_files
from quire_worker.support import refuse_unsupported_config, refuse_unsupported_options

ATTENTION_NAME = "quire_paged"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The check at load: tokens per sequence, and the largest difference of logits, as a part of their norm. In half
# precision rounding alone moves the logits of a deep model by percents; a mask or state that got lost moves them by tens.
_CHECK_TOKENS = 24
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PagedModel:
    """A model, ready to run. Holds weights but no pages: a `KVCache` of `cache_spec` comes with every call."""

    module: torch.nn.Module
    attention: PagedAttention
    cache_spec: CacheSpec
    device: torch.device
    architecture: str  # class name in transformers
    fingerprint: bytes  # 32 bytes, see `checkpoint.fingerprint`
    vocab_size: int  # logits per row
    max_position: int  # tokens a sequence may have at most
    eos_token_ids: frozenset[int]  # tokens that end a text; may be empty

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Writes the new tokens' keys and values to their pages and computes the logits that were asked for.

        Args:
            batch: on this model's device, block tables and slots within `cache`, ids below `vocab_size` and positions
                below `max_position`. Two batches may not run at once.
            cache: of this model's `cache_spec`; written in place.

        Returns:
            float32 `[rows, vocabulary]`, one row per chunk that needs logits.

        Raises:
            UnsupportedModelError: the model uses an option of attention that its first batches did not.
        """
        step = _PagedStep(self.attention.plan(batch.attention, cache.spec), cache.layers)
        return _run(self.module, batch, step)


def load_model(
    folder: Path | str, *, block_size: int = 16, dtype: str = "auto", device: torch.device | str = "cpu"
) -> PagedModel:
    """Loads a checkpoint and checks that pages give what its own attention gives.

    Args:
        folder: `config.json` and safetensors, as transformers saves them. Nothing is downloaded, and no code in the
            folder is run.
        block_size: tokens per page.
        dtype: "float32", "bfloat16" or "float16", of weights and pages; "auto" is float32 on a CPU and what the
            checkpoint was saved in elsewhere.
        device: of weights and pages.

    Raises:
        CheckpointError: the folder lacks something, or its weights do not fit its configuration.
        UnsupportedModelError: the model is made of something that cannot be served from pages; the message names it.
        ValueError: an unknown dtype, or a device without paged attention.
    """
    folder, device = Path(folder), torch.device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    attention = backend_for(device)
    model_fingerprint = fingerprint(folder)
    config = _read_config(folder)
    refuse_unsupported_config(config)
    module = _read_weights(folder, DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto"), device)
    cache_spec, vocab_size = _probe(module, block_size, device)
    text_config = config.get_text_config()
    max_position = getattr(text_config, "max_position_embeddings", None)
    if max_position is None:
        raise UnsupportedModelError(f"model type {config.model_type!r} does not say how long its sequences may be")
    model = PagedModel(
        module=module,
        attention=attention,
        cache_spec=cache_spec,
        device=device,
        architecture=type(module).__name__,
        fingerprint=model_fingerprint,
        vocab_size=vocab_size,
        max_position=max_position,
        eos_token_ids=_eos_token_ids(module),
    )
    _check_against_own_attention(model)
    return model


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    quire_step: _Step | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for the attention of one layer.

    Args:
        module: the layer's attention; its `layer_idx` says which layer's pages.
        query: `[1, query_heads, tokens, head_dim]`, rotated.
        key: `[1, kv_heads, tokens, head_dim]`, rotated; new tokens only.
        value: `[1, kv_heads, tokens, head_dim]`.
        attention_mask: None.
        quire_step: the forward pass.
        scaling: factor of the dot products; None is `head_dim ** -0.5`.
        dropout: 0.
        options: anything else the model passes; what is not understood is refused.

    Returns:
        `[1, tokens, query_heads, head_dim]`, and None for the attention weights.

    Raises:
        UnsupportedModelError: the layer asks for something that would have to be dropped, or dropped `quire_step`.
    """
    if quire_step is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand keyword arguments to its attention")
    refuse_unsupported_options(
        type(module).__name__,
        options
        | {
            "attention_mask": attention_mask,
            "dropout": dropout or None,
            "is_causal": options.get("is_causal", getattr(module, "is_causal", None)),
        },
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_index: int = module.layer_idx  # type: ignore[assignment]  # a plain attribute of every attention module
    attended = quire_step.attend(layer_index, _ragged(query), _ragged(key), _ragged(value), scale)
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class _Step(Protocol):
    """One forward pass, as the layers see it. Tensors are ragged, `[tokens, heads, head_dim]`."""

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class _PagedStep:
    """A real one: writes the layer's pages, then reads them."""

    plan: AttentionPlan
    layers: tuple[torch.Tensor, ...]

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pages = self.layers[layer_index]
        self.plan.append(key, value, pages)
        return self.plan.attend(query, pages, scale=scale)


class _ProbeStep:
    """The first one of a model: computes nothing, and notes what arrives in each layer."""

    def __init__(self) -> None:
        self.key_of_layer: dict[int, torch.Tensor] = {}

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if layer_index in self.key_of_layer:
            raise UnsupportedModelError(f"layer {layer_index} attends twice")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
            shapes = " and ".join(str(list(tensor.shape[1:])) for tensor in (query, key, value))
            raise UnsupportedModelError(f"queries, keys and values of {shapes} heads and dims do not fit one page")
        self.key_of_layer[layer_index] = key
        return torch.zeros_like(query)


def _run(module: torch.nn.Module, batch: ForwardBatch, step: _Step) -> torch.Tensor:
    with torch.inference_mode():
        output = module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=batch.logits_index,
            quire_step=step,
        )
        return output.logits[0].to(torch.float32)


def _ragged(heads: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]`, the same memory."""
    return heads[0].transpose(0, 1)


def _read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises what the many kinds of configuration happen to
        raise CheckpointError(f"config.json in {folder} cannot be used: {error}") from error


def _read_weights(folder: Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    weight_files(folder)
    try:
        with _quiet_progress():
            module, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # as above, and safetensors' own for damaged files
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # looked up in a table of its own
            raise UnsupportedModelError("the model does not use transformers' attention interface") from error
        raise CheckpointError(f"weights in {folder} cannot be loaded: {error}") from error
    if report["missing_keys"]:
        raise CheckpointError(f"weights in {folder} lack {_some(report['missing_keys'])}")
    if report["unexpected_keys"]:
        _log.warning("unused_weights", folder=folder.name, weights=_some(report["unexpected_keys"]))
    return module.to(device).eval()


def _probe(module: Any, block_size: int, device: torch.device) -> tuple[CacheSpec, int]:
    """Shape of the pages and size of the vocabulary, from what arrives rather than from names in the configuration."""
    model_type = module.config.model_type
    layer_count = module.config.get_text_config().num_hidden_layers
    step = _ProbeStep()
    batch = build_batch([Chunk([0, 0], 0, range(2), needs_logits=True)], block_size=block_size, device=device)
    try:
        logits = _run(module, batch, step)
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each old architecture fails in its own way
        raise UnsupportedModelError(f"model type {model_type!r} does not run on a flat batch: {error}") from error
    legacy = sorted(set(range(layer_count)) ^ set(step.key_of_layer))
    if legacy:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: layers {legacy} do not go through transformers' attention"
            " interface"
        )
    shapes = {(key.shape[1], key.shape[2], key.dtype) for key in step.key_of_layer.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"model type {model_type!r} cannot be served: the layers' keys differ: {shapes}")
    if logits.shape[0] != 1:
        raise UnsupportedModelError(f"model type {model_type!r} cannot be served: it computes logits of every token")
    kv_head_count, head_dim, dtype = shapes.pop()
    return CacheSpec(layer_count, kv_head_count, head_dim, block_size, dtype), logits.shape[1]


def _check_against_own_attention(model: PagedModel) -> None:
    """Two sequences, one of them in two chunks, through unwritten (NaN) pages in reverse order, must give the logits
    that transformers' own attention gives for each at once. Finds what no configuration tells: a bias inside the mask,
    a state beside keys and values, sequences of a flat batch that see each other.

    Raises:
        UnsupportedModelError: they do not.
    """
    spec, length = model.cache_spec, min(_CHECK_TOKENS, model.max_position)
    first = [(7 * i + 1) % model.vocab_size for i in range(length)]
    second = first[::-1]
    block_count = -(-length // spec.block_size)
    blocks = range(2 * block_count - 1, -1, -1)
    cache = KVCache(spec, 2 * block_count, device=model.device)
    for pages in cache.layers:
        pages.fill_(float("nan"))
    split = length // 2
    steps = [
        [Chunk(first[:split], 0, blocks[:block_count], needs_logits=False)],
        [
            Chunk(first[split:], split, blocks[:block_count], needs_logits=True),
            Chunk(second, 0, blocks[block_count:], needs_logits=True),
        ],
    ]
    for chunks in steps:
        paged = model.forward(build_batch(chunks, block_size=spec.block_size, device=model.device), cache)

    module: Any = model.module
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            own = module(torch.tensor([first, second], device=model.device), use_cache=False).logits[:, -1].float()
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    difference = ((paged - own).norm() / own.norm()).item()
    if not difference <= _CHECK_TOLERANCE[spec.dtype]:
        raise UnsupportedModelError(
            f"model type {module.config.model_type!r} cannot be served: through pages its logits differ from its own"
            f" by {difference:.2g} of their norm"
        )


def _eos_token_ids(module: Any) -> frozenset[int]:
    declared = module.generation_config.eos_token_id
    if declared is None:
        declared = module.config.get_text_config().eos_token_id
    if declared is None:
        return frozenset()
    return frozenset([declared] if isinstance(declared, int) else declared)


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """Without transformers' progress bars, which would land among the log lines."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
