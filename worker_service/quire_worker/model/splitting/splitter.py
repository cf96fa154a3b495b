"""The pass over a model that reduces it to one rank's part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import structlog
import torch

from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.splitting.attention import split_attention
from quire_worker.model.splitting.linear_parts import Split, Summed
from quire_worker.model.splitting.mlp import expert_splits, mlp_splits
from quire_worker.ranks.crew import Crew

# Largest allowed difference between the sum of the parts and the whole: norm of the difference over norm of the whole.
# Differences from another order of sums stay below this tolerance. A gate mistaken for a value exceeds it by far.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

_TRIAL_TOKENS = 4
_log = structlog.get_logger(__name__)


def split_over_ranks(module: Any, crew: Crew) -> Counter[str]:
    """Reduces a model to this rank's part. All ranks have to call this at the same time.

    Args:
        module: a transformers model on the CPU, for inference; changed in place.
        crew: this rank's crew.

    Returns:
        The number of split modules, by kind.

    Raises:
        UnsupportedModelError: the model has no module of a kind that can be split.
        RankLostError: a rank is gone.
    """
    hidden_size = module.config.get_text_config().hidden_size
    counts: Counter[str] = Counter()
    with torch.no_grad():
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                kind = _split(child, name, hidden_size, crew)
                if kind is not None:
                    setattr(parent, name, Summed(child, crew))
                    counts[kind] += 1
    if not counts:
        raise UnsupportedModelError(
            f"model type {module.config.model_type!r} cannot be served by {crew.size} ranks: none of its layers can "
            "be split"
        )
    _log.info("model split", ranks=crew.size, **counts)
    return counts


def _split(module: torch.nn.Module, name: str, hidden_size: int, crew: Crew) -> str | None:
    """Splits one module if its kind is known, and returns the kind; else None.

    Attention is recognized by names only. Attention is checked later, with the whole model, because it needs pages.
    """
    attention = split_attention(module, crew)
    if attention is not None:
        attention.apply(module)
        return "attention"
    # A number as a module's name shows one of several experts. Experts are not split one by one: the tokens decide
    # which experts run, so the number of sums would differ from pass to pass.
    if not name.isdigit() and _take_first(module, mlp_splits(module, hidden_size, crew), hidden_size, crew):
        return "mlp"
    if _take_first(module, expert_splits(module, hidden_size, crew), hidden_size, crew):
        return "experts"
    return None


def _take_first(module: torch.nn.Module, splits: Iterator[Split], hidden_size: int, crew: Crew) -> bool:
    """Applies the first split with parts that add up to the result of the whole module; returns False if there is
    none.
    """
    first = next(splits, None)
    if first is None:
        return False
    arguments, whole = _whole(module, hidden_size)
    if whole is None:
        return False
    for split in itertools.chain([first], splits):
        undo = split.apply(module)
        part = _result(module, arguments)
        if part is not None and _agrees(crew.add_up(part), whole):
            return True
        undo.apply(module)
    return False


def _whole(module: torch.nn.Module, hidden_size: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Returns random arguments that the module accepts, and its result; the result is None if it accepts none."""
    weight = next(module.parameters())
    dice = torch.Generator().manual_seed(0)
    token_count = weight.shape[0] if weight.ndim == 3 else _TRIAL_TOKENS  # one token for each expert
    hidden = torch.randn(token_count, hidden_size, generator=dice).to(weight.dtype)
    chosen = torch.arange(token_count).unsqueeze(1)
    arguments: tuple[torch.Tensor, ...] = ()
    for arguments in ((hidden.unsqueeze(0),), (hidden,), (hidden, chosen, torch.ones_like(hidden[:, :1]))):
        whole = _result(module, arguments)
        if whole is not None:
            return arguments, whole
    return arguments, None


def _result(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    try:
        result = module(*arguments)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError):  # the module takes other arguments
        return None
    return result if isinstance(result, torch.Tensor) else None


def _agrees(found: torch.Tensor, whole: torch.Tensor) -> bool:
    difference = (found.float() - whole.float()).norm()
    return found.shape == whole.shape and bool(difference <= TOLERANCE[whole.dtype] * whole.float().norm())
