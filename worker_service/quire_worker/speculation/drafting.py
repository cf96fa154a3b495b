"""Creates the drafting that the command line names, and loads its draft model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import structlog
from quire.errors import UsageError
from quire.types import GroupKind, GroupSpec

from quire_worker.model.checkpoint import UnsupportedModelError, has_tokenizer
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.scheduling.drafts import Drafting
from quire_worker.speculation.lookup import PromptLookup, Proposals

log = structlog.get_logger()


def drafting_of(options: argparse.Namespace, groups: Sequence[GroupSpec]) -> Drafting | None:
    """Returns the method of drafting; None without drafts.

    Args:
        options: the options of the command line.
        groups: the groups of the pool.

    Raises:
        UsageError: the model cannot use drafts.
    """
    if not options.speculative_tokens:
        return None
    if any(group.kind is GroupKind.STATE for group in groups):
        raise UsageError(
            "--speculative-tokens does not support models with recurrent states, which cannot undo a token"
        )
    if options.draft_model is not None:
        return Proposals(options.speculative_tokens)
    return PromptLookup(options.speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max)


def load_draft_model(options: argparse.Namespace, target: PagedModel, device: str) -> PagedModel | None:
    """Loads the draft model of the served model; returns None if the command line names none.

    Raises:
        ModelError: the checkpoint cannot be used.
        UsageError: the draft model does not fit the served model.
    """
    if options.draft_model is None:
        return None
    if not any(group.kind is GroupKind.FULL_ATTENTION for group in target.cache_spec.groups):
        raise UsageError(
            "--draft-model needs a served model with a layer of full attention, whose blocks the draft shares"
        )
    if target.rank_count > 1:
        raise UsageError("--draft-model cannot be combined with several ranks")
    drafting_of(options, target.cache_spec.groups)
    block_size = target.cache_spec.block_size
    model = load_model(options.draft_model, block_size=block_size, dtype=options.dtype, device=device)
    _check(options, model, target)
    log.info(
        "draft model loaded",
        architecture=model.architecture,
        tokens=options.speculative_tokens,
        block_bytes=model.cache_spec.bytes_per_block,
    )
    return model


def _check(options: argparse.Namespace, model: PagedModel, target: PagedModel) -> None:
    """Refuses a draft model with other tokens, or with layers that cannot share the served model's tables.

    The tokens are compared only if both models have a tokenizer.
    """
    if model.vocab_size != target.vocab_size:
        raise UsageError(
            f"--draft-model: {options.draft_model} has a vocabulary of {model.vocab_size} tokens, but the served "
            f"model has {target.vocab_size}: both must have the same tokens"
        )
    groups = model.cache_spec.groups
    if len(groups) != 1 or groups[0].kind is not GroupKind.FULL_ATTENTION:
        kinds = ", ".join(sorted({group.kind.name.lower() for group in groups}))
        raise UnsupportedModelError(
            f"--draft-model: {options.draft_model} has layers of {kinds}; a draft model must have only full "
            "attention, in pages of one shape"
        )
    if groups[0].block_size != target.cache_spec.block_size:
        wanted = target.cache_spec.block_size
        raise UnsupportedModelError(f"--draft-model: its blocks must have {wanted} tokens, not {groups[0].block_size}")
    both = options.draft_model, options.model
    if not all(has_tokenizer(Path(folder)) for folder in both):
        return
    drafted, served = (Tokenizer(folder).vocabulary() for folder in both)
    if drafted != served:
        raise UsageError(
            f"--draft-model: the tokenizer of {options.draft_model} must have the same tokens as the served model's"
        )
