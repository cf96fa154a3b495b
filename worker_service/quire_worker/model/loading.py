"""Loads a transformers model to be run on pages, and checks it.

A model is loaded in steps. Each step refuses a part that it cannot serve, and names the part:

1. Find the files in the folder (`checkpoint`).
2. Read from the configuration which cache each layer needs (`support`).
3. Run a first pass with a dummy attention that records the layers, shapes and options of attention
   (`transformers_seam`).
4. Compare logits: they must be the same through the model's own attention and through pages. This check is necessary
   because the seam lies inside transformers: a lost mask or state would give wrong text without an error.
5. Replace modules by kernels that compute the same results, if the device has such kernels (`rewrites`). Then compare
   the logits again with the model's own.

With several ranks, rank 0 computes the logits of the whole model before step 3. Then each rank keeps only its part
(`splitting`). The comparison is between the sum of all parts and the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import structlog
import torch
from quire.types import GroupKind

from quire_worker.attention import CpuPagedAttention, backend_for
from quire_worker.cache import CacheSpec
from quire_worker.host_memory import available_bytes, size
from quire_worker.model.adapters.sites import Sites
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import CheckpointError, UnsupportedModelError, fingerprint
from quire_worker.model.configuration import configuration_of, loader_of
from quire_worker.model.kv_scales import read_scales
from quire_worker.model.latent import keep_latents
from quire_worker.model.own_logits import OwnLogits, check_texts, may_be_rounding, own_logits_of, with_rounding
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.rewrites.devices import RewriteModel, rewrite_for
from quire_worker.model.rotary import longest_of, rotate_by_length, rotation_of
from quire_worker.model.splitting.splitter import split_over_ranks
from quire_worker.model.states.mixers import wrap_mixers
from quire_worker.model.support import check_ranks, layers_as_they_arrive, layers_of, states_as_they_arrive
from quire_worker.model.through_pages import check_through_pages, logits_through_pages
from quire_worker.model.transformers_seam import ATTENTION_NAME, ProbeStep, run
from quire_worker.model.weights import large_tensors_apart, read_weights
from quire_worker.page_format import KV_CACHE_DTYPES, KV_LAYOUTS
from quire_worker.ranks.crew import Crew

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PROBE_TOKENS = 2  # tokens of the first pass

_log = structlog.get_logger(__name__)


@large_tensors_apart()
def load_model(
    folder: Path | str,
    *,
    block_size: int = 16,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    kv_cache_dtype: str = "auto",
    kv_layout: str = "NHD",
    crew: Crew | None = None,
) -> PagedModel:
    """Loads a checkpoint, and checks that the model gives the same logits through pages as through its own attention.

    Args:
        folder: `config.json` and safetensors, as transformers saves them. Nothing is downloaded, and no code in the
            folder is run.
        block_size: tokens per page.
        dtype: dtype of weights and pages: "float32", "bfloat16" or "float16". "auto" is float32 on a CPU, and the
            checkpoint's dtype on other devices.
        device: device of weights and pages.
        kv_cache_dtype: "auto" (the dtype of the weights), "fp8_e4m3" or "fp8_e5m2"; see `page_format`.
        kv_layout: "NHD" or "HND".
        crew: the ranks that compute the model together; each gets its part, and all load at the same time.

    Raises:
        CheckpointError: a file is missing, or the weights do not fit the configuration.
        UnsupportedModelError: the model has a part that cannot be served from pages; the message names it.
        ValueError: an unknown dtype, or a device without paged attention.
        RankLostError: another rank is gone.
    """
    folder, device = Path(folder), torch.device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    if kv_cache_dtype not in KV_CACHE_DTYPES or kv_layout not in KV_LAYOUTS:
        known = ", ".join([*KV_CACHE_DTYPES, *KV_LAYOUTS])
        raise ValueError(f"the format of pages {kv_cache_dtype!r}, {kv_layout!r} is not known: known are {known}")
    attention = backend_for(device)
    model_fingerprint = fingerprint(folder)
    config = configuration_of(folder)
    loader, layers = loader_of(config), layers_of(config, block_size=block_size)
    rotation = rotation_of(config.get_text_config())
    check_ranks(config, 1 if crew is None else crew.size)
    with_states = {layer.layer for layer in layers if layer.kind is GroupKind.STATE}
    module = read_weights(folder, loader, DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto"))
    keep_latents(module, ATTENTION_NAME)
    wrap_mixers(module, with_states, attention.library if isinstance(attention, CpuPagedAttention) else None)
    max_position = longest_of(config.get_text_config())
    if max_position is None:
        raise UnsupportedModelError(f"model type {config.model_type!r} does not give its maximum sequence length")
    rank_count = 1 if crew is None else crew.size
    own = None if crew is None else _split(module, max_position, crew)
    module.to(device)
    sites = Sites(module)
    with sites.finding(PROBE_TOKENS) if crew is None else crew.learn(PROBE_TOKENS):
        probed, vocab_size = _probe(module, device)
    arrivals = probed.arrivals
    layers = layers_as_they_arrive(config.model_type, layers, arrivals, longest=max_position)
    layers, states = states_as_they_arrive(config.model_type, layers, probed.states.arrivals)
    try:
        key, latent_dim, _ = next(iter(arrivals.values()))
        is_hnd = kv_layout == "HND"
        cache_spec = CacheSpec(
            layers, block_size, key.dtype, max_position, latent_dim, is_hnd=is_hnd, rank_count=rank_count,
            states=states,
        )  # fmt: skip
    except ValueError as error:
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: {error}") from error
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
        rotation=rotation,
        lengths=None if rotation is None else rotate_by_length(module, rotation),
        sites=sites if crew is None else None,
        rank_count=rank_count,
    )
    own = own or own_logits_of(module, check_texts(vocab_size, max_position))
    own = replace(own, logits=own.logits.to(device))
    model = _checked(folder, model, own, kv_layout, crew)
    stored_as = KV_CACHE_DTYPES[kv_cache_dtype]
    return model if stored_as is None else _quantised(model, folder, stored_as, own)


def _checked(folder: Path, model: PagedModel, own: OwnLogits, kv_layout: str, crew: Crew | None) -> PagedModel:
    """Compares a model's logits through pages with its own. Then replaces modules by kernels and compares again.

    Returns the model, with kernels if the device has them.

    Raises:
        UnsupportedModelError: the logits differ.
    """
    dtype = model.cache_spec.dtype
    if crew is None and may_be_rounding(logits_through_pages(model), own, dtype):
        own = with_rounding(own, model.module, check_texts(model.vocab_size, model.max_position))
    prove = cache(partial(_prove, folder, model, own, kv_layout, crew))
    check_through_pages(model, own, prove)
    rewrite = rewrite_for(model.attention, dtype)
    return model if rewrite is None else _rewritten(model, rewrite, own, prove)


def _prove(folder: Path, model: PagedModel, own: OwnLogits, kv_layout: str, crew: Crew | None) -> None:
    """Loads the checkpoint again in float32 to check it there, because rounding cannot explain a difference then.

    Args:
        folder: the checkpoint's folder.
        model: the same model in half precision.
        own: the logits of its module.
        kv_layout: see `load_model`.
        crew: see `load_model`.

    Raises:
        UnsupportedModelError: the logits differ in float32, too, or there is not enough memory for the check.
    """
    takes = sum(parameter.numel() for parameter in model.module.parameters()) * torch.float32.itemsize
    room = available_bytes() if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
    if takes > room:
        raise UnsupportedModelError(
            f"rounding alone changes this model's logits by {own.rounding:.2g} of their norm, so it must be checked "
            f"in float32; that needs {size(takes)}, but only {size(room)} is available"
        )
    _log.info("rounding alone changes the logits, so the check is repeated in float32", by=round(own.rounding, 3))
    load_model(
        folder, block_size=model.cache_spec.block_size, dtype="float32", device=model.device, kv_layout=kv_layout,
        crew=crew,
    )  # fmt: skip


def _quantised(model: PagedModel, folder: Path, stored_as: torch.dtype, own: OwnLogits) -> PagedModel:
    """Returns the model with pages of fp8. Logs how much the logits change; a large change is not an error.

    Raises:
        CheckpointError: the checkpoint's scales are invalid.
        UnsupportedModelError: the device has no kernel for pages of this format.
    """
    spec = model.cache_spec
    if spec.latent_dim is not None and model.device.type != "cpu":
        raise UnsupportedModelError("latent attention has no kernel for fp8 pages; use kv-cache-dtype auto")
    scales = read_scales(folder)
    layers = tuple(
        layer if layer.kind is GroupKind.STATE else replace(layer, element_bytes=stored_as.itemsize)
        for layer in spec.layers
    )
    spec = replace(spec, layers=layers, stored_as=stored_as, scales=tuple(sorted(scales.items())))
    model = replace(model, cache_spec=spec)
    difference = own.difference(logits_through_pages(model))
    _log.info(
        "pages quantised", dtype=str(stored_as), layers_with_scales=len(scales), logits_differ_by=round(difference, 4)
    )
    return model


def _split(module: Any, max_position: int, crew: Crew) -> OwnLogits:
    """Reduces the module on the CPU to this rank's part.

    Returns the logits of the whole model, with the measured effect of rounding in half precision (`own_logits`).
    """

    def own_logits() -> tuple[torch.Tensor, float]:
        _, vocab_size = _probe(module, torch.device("cpu"))
        texts = check_texts(vocab_size, max_position)
        own = own_logits_of(module, texts)
        own = own if module.dtype == torch.float32 else with_rounding(own, module, texts)
        return own.logits, own.rounding

    own = OwnLogits(*crew.share(own_logits))
    split_over_ranks(module, crew)
    return own


def _probe(module: Any, device: torch.device) -> tuple[ProbeStep, int]:
    """Runs the first pass. Returns the inputs of each layer's attention, and the size of the vocabulary."""
    model_type = module.config.model_type
    batch = build_batch([Chunk([0] * PROBE_TOKENS, 0, [], needs_logits=True)], groups=[], device=device)
    step = ProbeStep(batch)
    try:
        logits = run(module, batch, step)
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each unsupported architecture fails in its own way
        raise UnsupportedModelError(f"model type {model_type!r} does not run on a flat batch: {error}") from error
    if logits.shape[0] != 1:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: it always computes the logits of every token"
        )
    return step, logits.shape[1]


def _rewritten(model: PagedModel, rewrite: RewriteModel, own: OwnLogits, prove: Callable[[], None]) -> PagedModel:
    """Returns the model with kernels in place of modules, after comparing the logits again.

    Candidates are tried on early tokens, and on tokens near the end of the longest sequence. Early tokens alone would
    not show every difference: Ministral scales its queries by a temperature that is 1 up to position 16,384.

    Raises:
        UnsupportedModelError: the logits differ from the model's own.
    """
    shift = model.max_position - len(check_texts(model.vocab_size, model.max_position)[0])
    module, counts = rewrite(model.module, lambda recording: logits_through_pages(model, recording.step, shift=shift))
    _log.info("model rewritten", **counts)
    model = replace(model, module=module)
    check_through_pages(model, own, prove)
    return model


def _eos_token_ids(module: Any) -> frozenset[int]:
    declared = module.generation_config.eos_token_id
    if declared is None:
        declared = module.config.get_text_config().eos_token_id
    if declared is None:
        return frozenset()
    listed = declared if isinstance(declared, list) else [declared]
    if not all(isinstance(token, int) for token in listed):
        raise CheckpointError(f"eos_token_id must be a token id or a list of token ids, not {declared!r:.200}")
    return frozenset(listed)
