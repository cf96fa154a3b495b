"""A pool at an allocator in another process, with waits that always end.

The stream is a `quire.session.Session` in its own thread. The scheduler's thread submits steps and checks for answers:

    1. turn    takes in answers; sends commits, frees and requests for blocks ahead of need in one step
    2. wait    waits only for a new prompt, or if a running request has no slot for its next token: `WAIT_S` at most,
               and after a silent wait not at all until the allocator answers
    3. alone   continues the turn without an answer: requests with free slots run, other requests are passed over

So a dead allocator costs one wait of `WAIT_S`. Requests run for about `AHEAD_TOKENS` more tokens. They continue when
the allocator answers again, or a new one has a report of the pages.

Prompts are granted as if each was requested in its turn. A refusal counts for one turn. The prompt is requested again
when the missing blocks are free. No prompt is admitted after a refused one. Only a part of the pool is granted ahead of
need, because these blocks could be cached blocks that hit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from quire import Allocator, GroupKind, GroupSpec, PoolSpec
from quire.protocol.outcomes import GrowOutcome, Result, StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import Session
from quire.session.lookahead import AHEAD_TOKENS, Decoding, Increment, needs_of

from quire_vllm.embedded import Admitted, Need, Prompt, Waiting
from quire_vllm.options import Options
from quire_vllm.pool import PoolShape
from quire_vllm.releases import UnsupportedError

WAIT_S: Final = 0.02
UNANSWERED_MAX: Final = 2  # While so many steps are unanswered, a turn sends only what cannot wait.
AHEAD_SHARE: Final = 16  # At most one block in 16 is granted to running requests ahead of need.


class PoolLostError(RuntimeError):
    """The allocator refused the pool's state, so the pages of running requests cannot be trusted."""


class Table:
    """The state of one sequence: its blocks in each group, the blocks that vLLM does not know yet, the granted and the
    requested tokens, and the free blocks that its refused request needs (0 without a refusal)."""

    __slots__ = ("asked", "blocks", "enough", "new", "room")

    def __init__(self, blocks: Sequence[Sequence[int]], room: int) -> None:
        self.blocks = blocks
        self.new = [list[int]() for _ in blocks]
        self.room = self.asked = room
        self.enough = 0


class Sent(NamedTuple):
    """An unanswered step: the future of its answer, the keys of its prompts by sequence, and the callbacks for its
    commits."""

    answer: Future[StepOutcome]
    prompts: dict[int, str]
    on_stored: list[Callable[[], None]]


class RemotePool:
    """One pool at an allocator. Only the scheduler's thread calls it.

    Attributes:
        core: the form of the allocator's core at the start, "compiled" or "python".
        is_silent: whether the last wait for an answer was in vain. The metrics server's thread reads it.
    """

    asks_ahead = True

    def __init__(self, shape: PoolShape, options: Options) -> None:
        self.shape = shape
        self._options = options
        self._increment = Increment.of(*[group.block_size for group in shape.groups])
        self._client = Allocator(options.allocator)
        self._spec = PoolSpec(
            shape.block_count,
            tuple(GroupSpec(GroupKind[kind.upper()], size, window) for kind, size, window in shape.groups),
            shape.cache_layout,
            shape.model_fingerprint,
            shape.watermark_block_count,
            chunk_token_count_max=shape.chunk_token_count,
            append_only=True,
            first_block_id=shape.first_block_id,
            tells_removed=shape.tells_removed,
        )
        self.on_removed: Callable[[Sequence[int], bytes], None] = lambda _groups, _digests: None
        self.on_cleared: Callable[[], None] = lambda: None
        self._last_id = 0
        self._begin()
        self.core = self._client.server_info().core

    def _begin(self) -> None:
        """Opens the session with an empty pool."""
        self._session: Session = self._client.session(self._options.pool, self._spec)
        try:
            self._session.open(self._options.open_timeout_s)
        except TimeoutError:
            self._session.close()
            raise UnsupportedError(
                f"the allocator at {self._options.allocator} did not grant pool {self._options.pool} within "
                f"{self._options.open_timeout_s:g} s: it is down, or another engine owns the pool"
            ) from None
        self._tables: dict[int, Table] = {}
        # request -> the allocator's answer, or None until it arrives. A refusal is forgotten when the next turn begins.
        self._prompts: dict[str, GrowOutcome | None] = {}
        self._dropped: set[str] = set()  # requests that no longer need their answer
        self._enough: dict[str, int] = {}  # refused prompt -> free blocks that it needs
        self._commits: dict[int, tuple[int, bytes]] = {}
        self._frees: list[int] = []
        self._on_stored: list[Callable[[], None]] = []
        self._under_way: deque[Sent] = deque()
        self.is_silent = False
        self._free_block_count = self.shape.block_count
        self._ahead_tokens = AHEAD_TOKENS

    # -- a turn --------------------------------------------------------------------------------------------------------

    def turn(self, needs: Sequence[Need], upcoming: Sequence[Prompt]) -> set[int]:
        """Sends everything pending in one step. Returns the running sequences that still wait for blocks."""
        self._take()
        self._prompts = {key: each for key, each in self._prompts.items() if each is None or each.result is Result.OK}
        self._ahead_tokens = self._tokens_ahead(len(self._tables))
        decoding, lacking = [], []
        for need in needs:
            table = self._tables[need.sequence_id]
            table.enough = 0
            decoding.append(Decoding(need.sequence_id, max(table.room, table.asked), need.token_count, need.last))
            if need.token_count > table.room:
                lacking.append(need)
        if len(self._under_way) < UNANSWERED_MAX:
            asks = self._asks(decoding, 0 if upcoming else self._free_block_count)
            prompts = self._to_ask(upcoming, self._free_block_count - len(asks) * self._increment.block_count)
            if asks or prompts or self._commits or self._frees:
                self._submit(asks, prompts)
        if lacking:
            self._wait(lambda: not any(self._waits(need) for need in lacking))
        return {need.sequence_id for need in lacking if self._waits(need)}

    def is_short(self, sequence_id: int, token_count: int, last: int) -> bool:
        """Returns whether a sequence that holds `token_count` tokens next has too few tokens granted ahead."""
        table = self._tables[sequence_id]
        ahead = max(1, self._ahead_tokens)
        return max(table.room, table.asked) < min(token_count + ahead, last) or table.room < token_count

    def _tokens_ahead(self, sequence_count: int) -> int:
        """Returns how many tokens ahead each of `sequence_count` sequences gets. Requests ask for a block more."""
        blocks = self.shape.block_count // AHEAD_SHARE // max(1, sequence_count)
        return min(AHEAD_TOKENS, max(0, blocks // self._increment.block_count - 1) * self._increment.token_count)

    def _asks(self, decoding: Sequence[Decoding[int]], free: int) -> list[tuple[int, int]]:
        """Returns the requests of running sequences. If the pool is too small to grant tokens ahead, they include the
        next turn's needs, so that the next turn does not wait."""
        if free and not self._ahead_tokens:
            soon = [each._replace(length=min(each.length + 1, each.last)) for each in decoding]
            needed = sum(each.lacks_room for each in soon) * self._increment.block_count
            if needed <= min(free, self.shape.block_count // AHEAD_SHARE):
                decoding = soon
        return needs_of(decoding, free, ahead_tokens=self._ahead_tokens, increment=self._increment)

    def _to_ask(self, upcoming: Sequence[Prompt], free: int) -> list[Prompt]:
        """Returns the prompts to request in a turn's step: the first one that may fit, and later ones that fit in any
        case. A prompt admitted after a refused one could take its blocks. Other prompts are requested in their turn."""
        prompts, left = list[Prompt](), free - self.shape.watermark_block_count
        for prompt in upcoming:
            if prompt.key in self._prompts:
                continue
            left -= self._increment.blocks(prompt.token_count)
            if not self._may_fit(prompt.key) or (prompts and left < 0):
                break
            prompts.append(prompt)
        return prompts

    def _waits(self, need: Need) -> bool:
        table = self._tables[need.sequence_id]
        return table.room < need.token_count <= table.asked

    def _may_fit(self, key: str) -> bool:
        """Returns whether a prompt may fit by now; True if it was never refused."""
        return self._enough.get(key, 0) <= self._free_block_count or not self._tables or bool(self._frees)

    def admit(self, prompt: Prompt) -> tuple[int, Admitted | Waiting]:
        """Requests a new sequence, or takes the answer to an earlier request, which is usually in this turn's step."""
        key = prompt.key
        self._dropped.discard(key)
        if key not in self._prompts:
            if not self._may_fit(key):
                self._unblock()
                return 0, Waiting(False)
            self._submit([], [prompt])
        self._wait(lambda: self._prompts[key] is not None)
        grown = self._prompts[key]
        if grown is None:
            return 0, Waiting(True)
        del self._prompts[key]
        if grown.result is not Result.OK:
            if grown.result is not Result.PENDING:
                self._unblock()
            return 0, Waiting(grown.result is Result.PENDING)
        self._enough.pop(key, None)
        table = self._tables[grown.sequence_id]
        return grown.sequence_id, Admitted(grown.matched_token_count, table.room, table.blocks)

    def _unblock(self) -> None:
        """Takes back all blocks if only prompts admitted after a refused prompt have any. vLLM runs none of these
        before the refused prompt, so no block would ever become free."""
        if len(self._tables) == sum(map(self.is_let_in, self._prompts)):
            while self.drop_upcoming():
                pass

    def has_room_for(self, token_counts: Sequence[int]) -> bool:
        """Returns whether new sequences of these token counts would all fit, according to the last answer."""
        return self._increment.blocks(sum(token_counts)) <= self._free_block_count

    def is_let_in(self, key: str) -> bool:
        """Returns whether a prompt has its blocks already, because this turn's step requested them."""
        grown = self._prompts.get(key)
        return grown is not None and grown.result is Result.OK

    def drop_upcoming(self) -> bool:
        """Takes back the blocks of the newest prompt that was admitted ahead of time. Returns whether there was one."""
        for key in reversed(self._prompts):
            if self.is_let_in(key):
                self.forget(key)
                return True
        return False

    def forget(self, key: str) -> None:
        """Drops the request for a prompt that is not running, and its blocks, if it got any."""
        self._enough.pop(key, None)
        if key in self._prompts:
            grown = self._prompts[key]
            if grown is None:
                self._dropped.add(key)
                return
            del self._prompts[key]
            if grown.result is Result.OK:
                self.free(grown.sequence_id)

    def grow(self, sequence_id: int, token_count: int) -> Sequence[Sequence[int]] | None:
        """Gets blocks for this many tokens of a sequence. Returns the blocks of each group that vLLM does not know yet,
        or None if there are too few or the answer is late."""
        table = self._tables[sequence_id]
        if table.room < token_count:
            if table.enough > self._free_block_count and not self._frees:
                return None
            if table.asked < token_count or self._frees:
                self._submit([(sequence_id, token_count)])
            self._wait(lambda: table.room >= token_count or table.asked < token_count)
            if table.room < token_count:
                return None
        new, table.new = table.new, [list[int]() for _ in table.new]
        return new

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes, on_stored: Callable[[], None] | None = None
    ) -> None:
        """Publishes blocks with the next step, and calls `on_stored` when it is answered."""
        if on_stored is not None:
            self._on_stored.append(on_stored)
        self._commits[sequence_id] = token_count, self._commits.get(sequence_id, (0, b""))[1] + digests

    def free(self, sequence_id: int) -> None:
        """Drops a sequence with the next step. If no sequence is left, a step is sent at once, because an idle engine
        has no turns."""
        del self._tables[sequence_id]
        self._frees.append(sequence_id)
        if not self._tables:
            self._submit([])

    def reset(self) -> bool:
        """Drops the cache if no request holds blocks; returns whether it did. Returns False, too, if the answer to an
        abandoned prompt is late, because that prompt might hold blocks."""
        for key in list(self._prompts):
            self.forget(key)
        self._wait(lambda: not self._prompts)
        if self._tables or self._prompts:
            return False
        self._submit([], drops=True)
        return True

    def usage(self) -> float:
        """Returns the share of blocks in tables, with those granted ahead of need, according to the last answer."""
        if not self._tables:
            return 0.0
        return 1.0 - self._free_block_count / self.shape.block_count

    def close(self) -> None:
        """Gives the pool back. If no allocator answers, the lease ends by itself."""
        self._session.close()
        self._client.close()

    # -- steps and answers ---------------------------------------------------------------------------------------------

    def _submit(
        self,
        grows: Sequence[tuple[int, int]],
        upcoming: Sequence[Prompt] = (),
        *,
        drops: bool = False,
    ) -> None:
        step, prompts = StepBuilder(), dict[int, str]()
        for sequence_id, (token_count, digests) in self._commits.items():
            step.commit(sequence_id, token_count, digests)
        for sequence_id in self._frees:
            step.free(sequence_id)
        if drops:
            step.drop(self._options.namespace)
        for sequence_id, token_count in grows:
            step.grow(sequence_id, token_count)
            self._tables[sequence_id].asked = token_count
            self._tables[sequence_id].enough = 0
        for prompt in upcoming:
            self._last_id += 1
            self._dropped.discard(prompt.key)
            self._prompts[prompt.key], prompts[self._last_id] = None, prompt.key
            step.allocate(
                self._last_id,
                prompt.chunk_token_count,
                prompt.digests,
                self._options.namespace,
                prompt_token_count=prompt.token_count,
                defer_token_count=self.shape.digest_tokens,
                is_return=prompt.is_return,
            )
        self._under_way.append(Sent(self._session.submit(step), prompts, self._on_stored))
        self._commits, self._frees, self._on_stored = {}, [], []

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits for answers until `is_over` returns True, or at most `WAIT_S`."""
        deadline = time.monotonic() + (0.0 if self.is_silent else WAIT_S)
        self._take()
        while self._under_way and not is_over():
            try:
                self._under_way[0].answer.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                if self._under_way[0].answer.done():  # The TimeoutError is the answer, not the end of this wait.
                    raise self._lost() from error
                self.is_silent = True
                return
            except Exception as error:
                raise self._lost() from error
            self._take()

    def _take(self) -> None:
        """Processes the answers that have arrived."""
        while self._under_way and self._under_way[0].answer.done():
            sent = self._under_way.popleft()
            try:
                outcome = sent.answer.result()
            except Exception as error:
                raise self._lost() from error
            self.is_silent = False
            self._free_block_count = outcome.free_block_count
            for tell in sent.on_stored:
                tell()
            if outcome.is_removed_cut:
                self.on_cleared()
            for left in outcome.removed:
                self.on_removed(left.groups, left.digests)
            for grown in outcome.grows:
                if grown.sequence_id in sent.prompts:
                    self._take_prompt(sent.prompts[grown.sequence_id], grown)
                elif grown.sequence_id in self._tables:  # A sequence without a table was freed meanwhile.
                    self._take_room(self._tables[grown.sequence_id], grown)

    def _take_prompt(self, key: str, grown: GrowOutcome) -> None:
        if grown.result is Result.OK:
            self._tables[grown.sequence_id] = Table(grown.blocks, grown.token_count)
        if key in self._dropped:
            self._dropped.discard(key)
            del self._prompts[key]
            if grown.result is Result.OK:
                self.free(grown.sequence_id)
            return
        self._prompts[key] = grown
        if grown.result is Result.NO_SPACE:
            self._enough[key] = self._free_block_count + grown.shortfall

    def _take_room(self, table: Table, grown: GrowOutcome) -> None:
        if grown.result is Result.OK:
            for new, added in zip(table.new, grown.blocks, strict=False):
                new.extend(added)
            table.room = max(table.room, grown.token_count)
            table.asked = max(table.asked, table.room)
        else:
            table.asked, table.enough = table.room, self._free_block_count + max(1, grown.shortfall)

    def _lost(self) -> PoolLostError:
        return PoolLostError(
            f"the pool {self._options.pool} at {self._options.allocator} is lost: start the engine again"
        )
