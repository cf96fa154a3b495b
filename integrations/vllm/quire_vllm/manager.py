"""A `KVCacheManager` for vLLM's scheduler that gets its blocks from Quire.

Lifecycle of a request here:

    1. asked      `get_computed_blocks` allocates the whole prompt, which also holds the blocks that it hits. A refused
                  request asks again in a later turn. While another request computes its prefix, it is passed over.
    2. admitted   The first `allocate_slots` means that the scheduler runs the request.
    3. running    Each later `allocate_slots` gets blocks for new tokens. `new_step_starts` publishes computed blocks.
    4. freed      `free`: the request ended or was preempted.

A block is published when the pass that wrote it is over (vLLM's own manager publishes when the pass is scheduled).
Tables are append-only: vLLM's model runners add blocks to a running request's table, and cannot replace any.

vLLM pads with block 0 and never grants it, so the pool has one block fewer, and its ids begin at 1. A block that falls
out of a window is released when the pass that moved past it is published. The runner's table keeps the old entry, which
is never read again. A table that is handed over as a whole has block 0 there.

In models with windows, a prompt gets blocks for its first chunk, and more as its window moves. Cached recurrent states
(vLLM's mode `align`) are windows of one block. vLLM's worker copies a state from block to block itself, and the
scheduler ends the passes of prompts at block ends, so that each block has its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from quire_allocator.core.spec import NULL_BLOCK
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

from quire_vllm.embedded import Admitted, EmbeddedPool, Need, Prompt
from quire_vllm.events import CacheEvents

if TYPE_CHECKING:
    from quire_vllm.remote import RemotePool

DIGEST_BYTES: Final = 32
NULL_BLOCKS: Final = 1  # number of blocks that vLLM never grants: its block 0
PROMPTS_PER_STEP: Final = 32


class Held:
    """The state of one request.

    Attributes:
        block_ids: the request's table in each group.
        token_count: tokens that its blocks can hold; whole blocks once it runs.
        committed_token_count: computed tokens reported to the pool, with all blocks that they fill.
        has_run: whether the scheduler has run the request.
        last: the most tokens that the request can ever have.
    """

    __slots__ = (
        "block_ids",
        "committed_token_count",
        "has_run",
        "last",
        "matched_token_count",
        "request",
        "sequence_id",
        "token_count",
    )

    def __init__(
        self, request: Request, sequence_id: int, admitted: Admitted, block_ids: list[list[int]], token_count_max: int
    ) -> None:
        self.request = request
        self.last = min(token_count_max, request.num_prompt_tokens + request.max_tokens)
        self.sequence_id = sequence_id
        self.matched_token_count = admitted.matched_token_count
        self.block_ids = block_ids
        self.token_count = admitted.token_count
        self.committed_token_count = admitted.matched_token_count
        self.has_run = False


class QuireCacheManager(KVCacheManager):
    """vLLM's interface to Quire. A docstring says how a method differs from the base class.

    The base class is initialized, too: scheduler and engine read block sizes from its coordinator, which never grants a
    block.
    """

    def __init__(self, pool: EmbeddedPool | RemotePool, scheduler: Any, **options: Any) -> None:
        super().__init__(**options)
        self.pool = pool
        self._scheduler = scheduler
        self._edge_tokens = pool.shape.edge_tokens
        self._digest_tokens = pool.shape.digest_tokens
        budget: int = scheduler.max_num_scheduled_tokens
        self._pass_tokens = pool.shape.digest_tokens if pool.shape.caches_states else budget
        # Without a prefix cache, vLLM makes no hashes. But a block leaves its window only after a commit, and commits
        # need digests. So this class makes digests up.
        self._windows = [group for group in pool.shape.groups if group.window]
        self._makes_digests_up = not self.enable_caching and bool(self._windows)
        self._held: dict[str, Held] = {}
        self._events: CacheEvents | None = None
        if self.block_pool.enable_kv_cache_events:
            self._events = CacheEvents(self.block_pool, pool.shape)
            self.pool.on_removed = self._events.removed
            self.pool.on_cleared = self._events.cleared
        # Request that is skipped in this turn -> tokens. Some requests wait until another request has computed their
        # prefix; they have their own tokens here. The others would take blocks from these requests; they have 0 tokens.
        self._passed_over: dict[str, int] = {}
        self._zeroed = [manager.records_new_block_ids for manager in self.coordinator.single_type_managers]
        self._new_block_ids: list[int] = []  # new blocks of `_zeroed` groups since vLLM last took them

    # -- a turn --------------------------------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Publishes the blocks of earlier passes."""
        self._passed_over.clear()
        running = [held for held in self._held.values() if held.has_run]
        for held in running:
            self._commit(held)
        needs = self._needs(running) if self.pool.asks_ahead else ()
        waiting = self.pool.turn(needs, self._upcoming() if self.pool.asks_ahead else ())
        for held in running if waiting else ():
            # vLLM then skips the waiting request until the next turn, and preempts no other request for it.
            if held.sequence_id in waiting:
                held.request.next_decode_eligible_step = self._scheduler.current_step + 1

    def _upcoming(self) -> list[Prompt]:
        """Returns the prompts that this turn may admit, so that one step asks for all of them."""
        scheduler, prompts = self._scheduler, list[Prompt]()
        seats = min(scheduler.max_num_running_reqs - len(scheduler.running), PROMPTS_PER_STEP)
        budget = scheduler.max_num_scheduled_tokens
        for request in scheduler.waiting:
            if len(prompts) >= seats or budget <= 0:
                break
            if request.request_id not in self._held:
                prompts.append(self._prompt(request))
            budget -= request.num_tokens
        return prompts

    def _prompt(self, request: Request) -> Prompt:
        digests = self._digests(request, 0, len(request.block_hashes))
        if not self.prefix_cache_lookup_enabled(request):
            digests = b""
        count = request.num_tokens
        chunk = min(count, self._pass_tokens) if self.pool.shape.chunk_token_count else count
        return Prompt(request.request_id, chunk, count, digests, request.num_preemptions > 0)

    def _needs(self, running: Sequence[Held]) -> Sequence[Need]:
        """Returns the next needs of running requests. In most turns all have enough blocks, and the result is empty."""
        size = self._digest_tokens
        lookahead, most, counts, is_short = self._scheduler.num_lookahead_tokens, self.max_model_len, [], False
        for held in running:
            request = held.request
            count = min(request.num_tokens_with_spec + request.num_output_placeholders + lookahead, most)
            if self.pool.shape.caches_states:
                count = min(count, (request.num_computed_tokens // size + 1) * size)
            elif self._windows:  # Only the next pass is requested: a long prompt may never fit as a whole.
                count = min(count, request.num_computed_tokens + self._pass_tokens + lookahead)
            counts.append(count)
            is_short = is_short or self.pool.is_short(held.sequence_id, count, held.last)
        if not is_short:
            return ()
        return [Need(held.sequence_id, count, held.last) for held, count in zip(running, counts, strict=True)]

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Admits the request's whole prompt. The scheduler uses only the number of hit tokens."""
        held = self._held.get(request.request_id)
        if held is None and self._would_take_room(request):
            self._passed_over[request.request_id] = 0
        elif held is None:
            held = self._admit(request)
        return self.empty_kv_cache_blocks, held.matched_token_count if held is not None else 0, 0

    def _would_take_room(self, request: Request) -> bool:
        """Returns whether a request would overtake a passed-over request although both do not fit. vLLM's manager
        admits requests in order."""
        if not self._passed_over or self.pool.is_let_in(request.request_id):
            return False
        return not self.pool.has_room_for([request.num_tokens, *self._passed_over.values()])

    def is_passed_over(self, request: Request) -> bool:
        """Returns whether a request should be tried again in the next turn instead of now."""
        return request.request_id in self._passed_over

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Gets blocks for an admitted request's tokens, without publishing blocks."""
        elsewhere = (num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, reserved_blocks)
        assert not any(elsewhere), "connectors and encoders are refused at start"
        held = self._held.get(request.request_id)
        if held is None:
            return None
        until = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens + num_lookahead_tokens
        added = self._make_room(held, min(until, self.max_model_len))
        if added is None:
            return None
        held.has_run = True
        return self._as_blocks(added)

    def _make_room(self, held: Held, until: int) -> Sequence[Sequence[int]] | None:
        """Gets blocks for `until` tokens of a request. Returns the blocks added to each table; None if there are too
        few."""
        if until <= held.token_count:
            return ()
        until = -(-until // self._digest_tokens) * self._digest_tokens
        blocks = self.pool.grow(held.sequence_id, until)
        while blocks is None and self._drop_newest_unrun(held):
            blocks = self.pool.grow(held.sequence_id, until)
        if blocks is None:
            return None
        for table, added, is_zeroed in zip(held.block_ids, blocks, self._zeroed, strict=False):
            table.extend(added)
            self._new_block_ids += added if is_zeroed else ()
        held.token_count = until
        return blocks

    def _drop_newest_unrun(self, asking: Held) -> bool:
        """Takes back the blocks of the newest admitted request that has not run; vLLM would not have granted them yet.
        Returns whether there was such a request."""
        for held in reversed(self._held.values()):
            if not held.has_run and held is not asking:
                self._drop(held)
                return True
        return self.pool.drop_upcoming()

    def _admit(self, request: Request) -> Held | None:
        sequence_id, answer = self.pool.admit(self._prompt(request))
        if not isinstance(answer, Admitted):
            if answer.is_computed_elsewhere:
                self._passed_over[request.request_id] = request.num_tokens
            return None
        tables = [[0 if block == NULL_BLOCK else block for block in table] for table in answer.tables]
        for table, group, is_zeroed in zip(tables, self.pool.shape.groups, self._zeroed, strict=True):
            self._new_block_ids += table[answer.matched_token_count // group.block_size :] if is_zeroed else ()
        held = Held(request, sequence_id, answer, tables, self.max_model_len)
        if self._events is not None:
            self._events.hit(request, answer.matched_token_count)
        self._held[request.request_id] = held
        return held

    # -- publishing blocks ---------------------------------------------------------------------------------------------

    def _commit(self, held: Held) -> None:
        """Commits full blocks whose passes are over; vLLM does not count tokens that may still be rejected. If a block
        falls out of a window, computed tokens are committed even without a full block."""
        request, size, before = held.request, self._digest_tokens, held.committed_token_count
        computed = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        first, end = before // size, computed // size
        if not self._makes_digests_up:
            end = min(end, len(request.block_hashes))
        token_count = end * size
        if self._windows and computed < token_count + size and self._falls_out(before, computed):
            token_count = computed
        if token_count <= before:
            return
        on_stored = None
        if self._events is not None and end > first:
            on_stored = partial(self._events.stored, request, first, end)
        self.pool.commit(held.sequence_id, token_count, self._digests(request, first, end), on_stored)
        held.committed_token_count = token_count

    def _falls_out(self, before: int, token_count: int) -> bool:
        """Returns whether a window drops a block between `before` and `token_count` tokens."""
        return any(window.first_block(before) < window.first_block(token_count) for window in self._windows)

    def _digests(self, request: Request, first: int, end: int) -> bytes:
        """Returns vLLM's block hashes as digests. Hashes of 16 bytes are padded with zeros."""
        if self._makes_digests_up:
            names = [f"{request.request_id} {number}".encode() for number in range(first, end)]
            return b"".join([hashlib.sha256(name).digest() for name in names])
        hashes = request.block_hashes[first:end]
        if hashes and len(hashes[0]) != DIGEST_BYTES:
            hashes = [digest.ljust(DIGEST_BYTES, b"\0") for digest in hashes]
        return b"".join(hashes)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Does nothing, because `new_step_starts` publishes blocks."""

    # -- the end -------------------------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Publishes the last full blocks, and drops the request. A second call does nothing."""
        held = self._held.get(request.request_id)
        if held is not None:
            if held.has_run:
                self._commit(held)
            self._drop(held)
        else:
            self.pool.forget(request.request_id)

    def give_up(self, request: Request) -> None:
        """Takes back the blocks of an admitted request that will not run in this turn."""
        held = self._held.get(request.request_id)
        if held is not None and not held.has_run:
            self._drop(held)

    def _drop(self, held: Held) -> None:
        del self._held[held.request.request_id]
        self.pool.free(held.sequence_id)

    def reset_prefix_cache(self) -> bool:
        """Drops the cache, unless a request holds blocks."""
        for held in [held for held in self._held.values() if not held.has_run]:
            self._drop(held)
        if not self.pool.reset():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        if self._events is not None:
            self._events.cleared()
        return True

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Returns the share of blocks in tables."""
        return self.pool.usage()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Returns the request's whole table."""
        held = self._held.get(request_id)
        return self._as_blocks(held.block_ids if held is not None else ())

    def estimate_cached_tokens(self, request: Request) -> int:
        """Counts the tokens of a request that later requests can hit when its pass is over."""
        if not self.enable_caching or request.request_id not in self._held:
            return 0
        return min(request.num_computed_tokens, request.num_tokens) // self._edge_tokens * self._edge_tokens

    def _as_blocks(self, block_ids: Sequence[Sequence[int]]) -> KVCacheBlocks:
        if not any(block_ids):
            return self.empty_kv_cache_blocks
        known = self.block_pool.blocks
        return KVCacheBlocks(tuple([known[block] for block in table] for table in block_ids))

    # -- calls that need vLLM's own blocks -----------------------------------------------------------------------------

    def take_new_block_ids(self) -> list[int]:
        """Returns the new blocks of groups that need zeroed blocks: groups of attention in models with states."""
        taken, self._new_block_ids = self._new_block_ids, []
        return taken
