"""A transformers model, ready to run on pages; `loading.py` makes it."""

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
    rotation: Rotation | None = None  # how keys follow the lengths of requests
    lengths: TokenLengths | None = None  # of the tokens of a pass, where keys follow them
    sites: Sites | None = None  # where adapters change it; None where it takes none
    rank_count: int = 1  # processes that each have a part of the model

    def limited_to(self, token_count: int) -> PagedModel:
        """Returns the model for sequences of at most `token_count` tokens, and pages planned for these; it is not more
        than `max_position`."""
        return replace(self, max_position=token_count, cache_spec=replace(self.cache_spec, token_count_max=token_count))

    def forward(
        self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Writes the new tokens' keys and values to their pages and computes the logits that were asked for.

        Args:
            batch: on this model's device, block tables and slots within `cache`, ids below `vocab_size` and positions
                below `max_position`. Two batches may not run at once.
            cache: of this model's `cache_spec`; written in place.
            before_kernels: called before a call that takes most of the pass and needs nothing of the interpreter, where
                there is such a one.

        Returns:
            float32 `[rows, vocabulary]`, one row per chunk that needs logits, or for each token of one that is scored.

        Raises:
            UnsupportedModelError: the model uses an option of attention that its first batches did not.
        """
        step = self.plan(batch, cache, before_kernels)
        with nullcontext() if self.sites is None else self.sites.during(batch.adapters, batch.input_ids.shape[1]):
            return run(self.module, batch, step, self.lengths)

    def plan(self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None) -> PagedStep:
        """Prepares a forward pass, once for each group and shape of pages; arguments as of `forward`."""
        plans = [self.attention.plan(batch.attention[group], pages) for group, pages in cache.kinds]
        states = StatePass(cache.states, batch, self.sites) if cache.states else None
        return PagedStep(plans, cache.layers, states, before_kernels)
