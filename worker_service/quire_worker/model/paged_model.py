"""A transformers model, ready to run on pages. `loading.py` creates it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from quire_worker.attention import PagedAttention
from quire_worker.cache import CacheSpec, KVCache
from quire_worker.model.adapters.sites import Sites
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.rotary import Rotation, TokenLengths
from quire_worker.model.states.state_pass import StatePass
from quire_worker.model.transformers_seam import PagedStep, run


@dataclass(frozen=True, slots=True, eq=False)
class PagedModel:
    """A model, ready to run. Holds weights but no pages: every call gets a `KVCache` of `cache_spec`."""

    module: torch.nn.Module
    attention: PagedAttention
    cache_spec: CacheSpec
    device: torch.device
    architecture: str  # class name in transformers
    fingerprint: bytes  # 32 bytes, see `checkpoint.fingerprint`
    vocab_size: int  # logits per row
    max_position: int  # tokens of the longest sequence
    eos_token_ids: frozenset[int]  # tokens that end a text; may be empty
    rotation: Rotation | None = None  # how keys depend on the length of the request; None if they do not depend on it
    lengths: TokenLengths | None = None  # the lengths that a pass's tokens are rotated for, if keys depend on them
    sites: Sites | None = None  # layers that adapters can change; None if the model takes no adapters
    rank_count: int = 1  # processes that each have a part of the model

    def limited_to(self, token_count: int) -> PagedModel:
        """Returns the model with sequences limited to `token_count` tokens, and pages planned for that length.

        `token_count` must be at most `max_position`.
        """
        return replace(self, max_position=token_count, cache_spec=replace(self.cache_spec, token_count_max=token_count))

    def forward(
        self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Writes the new tokens' keys and values to their pages, and computes the wanted logits.

        Args:
            batch: a batch on this model's device, with block tables and slots within `cache`, ids below `vocab_size`
                and positions below `max_position`. Two batches must not run at once.
            cache: a cache of this model's `cache_spec`; written in place.
            before_kernels: called right before the one call that takes most of the pass and releases the interpreter
                lock. The function is not called if the pass has no such call.

        Returns:
            float32 `[rows, vocabulary]`: one row per chunk that needs logits, or one per token of a scored chunk.

        Raises:
            UnsupportedModelError: the model uses an option of attention that its first passes did not use.
        """
        step = self.plan(batch, cache, before_kernels)
        with nullcontext() if self.sites is None else self.sites.during(batch.adapters, batch.input_ids.shape[1]):
            return run(self.module, batch, step, self.lengths)

    def plan(self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None) -> PagedStep:
        """Plans a forward pass: attention once for each group and shape of pages. See `forward` for the arguments."""
        plans = [self.attention.plan(batch.attention[group], pages) for group, pages in cache.kinds]
        states = StatePass(cache.states, batch, self.sites) if cache.states else None
        return PagedStep(plans, cache.layers, states, before_kernels)
