"""Hit ratios of a cache of prompt blocks under each eviction policy, on a trace of requests, one request at a time.

A trace has a line of JSON per request, with `hash_ids`: one id per prompt block. Two requests that share a prefix have
equal ids at their start. The script prints the share of all block references that hit. The policies to compare with
are written from their papers and do not know prefixes. For these policies, a request is a list of blocks, the last one
first, as a sequence frees them. Quire's policies run through its pool: allocate, commit, free. The optimum knows the
future. It evicts the block that is used again latest (Belady, 1966).

A second table has chats that take turns in a pool that holds 16 of them. LRU hits nothing there.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.eviction.policies import DEFAULT_POLICY, POLICIES
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result
from report import Goal, add_output_arguments, publish
from session_sides.in_process import InProcess

Request = Sequence[int]

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
BLOCK_TOKENS = 512
CHATS = range(15, 25)
CHATS_IN_POOL = 16
CHAT_BLOCKS = 60
CHAT_ROUNDS = 50


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="file of requests, one line of JSON per request")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BLOCKS", help="(default: %(default)s)")
    parser.add_argument("--split", type=int, default=1, help="divide each block into this many (default: %(default)s)")
    parser.add_argument(
        "--restarts", type=int, nargs="*", default=(), metavar="N",
        help="also replace the allocator this many times during the trace; its pool is rebuilt from the owner's report",
    )  # fmt: skip
    add_output_arguments(parser)
    return parser.parse_args()


def read_trace(file: Path, split: int) -> list[Request]:
    """Returns the blocks of each request."""
    with file.open() as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    return [[block * split + part for block in request for part in range(split)] for request in requests]


def chats_in_turn(chat_count: int) -> list[Request]:
    """Returns requests of chats. Each chat asks for its blocks again in every round."""
    chats: list[Request] = [range(chat * CHAT_BLOCKS, (chat + 1) * CHAT_BLOCKS) for chat in range(chat_count)]
    return chats * CHAT_ROUNDS


# -- policies to compare with: each returns the number of hits ---------------------------------------------------------


def lru(requests: Sequence[Request], capacity: int) -> int:
    """Evicts the least recently used block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in reversed(request):
            if block in cache:
                hits += 1
                cache.move_to_end(block)
                continue
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = None
    return hits


def two_q(requests: Sequence[Request], capacity: int) -> int:
    """2Q (Johnson and Shasha, VLDB '94), full version: a quarter for new blocks, half as many remembered."""
    new: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    remembered: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in reversed(request):
            if block in main:
                hits += 1
                main.move_to_end(block)
                continue
            if block in new:
                hits += 1
                continue
            if len(new) + len(main) >= capacity:
                if len(new) > capacity // 4 or not main:
                    left, _ = new.popitem(last=False)
                    remembered[left] = None
                    if len(remembered) > capacity // 2:
                        remembered.popitem(last=False)
                else:
                    main.popitem(last=False)
            if block in remembered:
                del remembered[block]
                main[block] = None
            else:
                new[block] = None
    return hits


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP '23): a tenth is for new blocks, one hit moves a block to the main queue, and as many
    evicted blocks are remembered as are cached."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.hits_of: dict[int, int] = {}
        self.remembered: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        """Counts one access; returns whether it hits."""
        if block in self.hits_of:
            self.hits_of[block] = min(3, self.hits_of[block] + 1)
            return True
        while len(self.hits_of) >= self.capacity:
            if self.small and (len(self.small) >= self.capacity // 10 or not self.main):
                self._leave_small()
            else:
                self._leave_main()
        if block in self.remembered:
            del self.remembered[block]
            self.main.append(block)
        else:
            self.small.append(block)
        self.hits_of[block] = 0
        return False

    def _leave_small(self) -> None:
        block = self.small.popleft()
        if self.hits_of[block]:
            self.hits_of[block] = 0
            self.main.append(block)
            return
        del self.hits_of[block]
        self.remembered[block] = None
        if len(self.remembered) > self.capacity:
            self.remembered.popitem(last=False)

    def _leave_main(self) -> None:
        while True:
            block = self.main.popleft()
            if not self.hits_of[block]:
                del self.hits_of[block]
                return
            self.hits_of[block] -= 1
            self.main.append(block)


def s3_fifo(requests: Sequence[Request], capacity: int) -> int:
    """Evicts as S3-FIFO does: with a small queue, a main queue, and the ids of blocks that the small queue evicted."""
    cache = S3Fifo(capacity)
    return sum(cache.access(block) for request in requests for block in reversed(request))


def gdsf(requests: Sequence[Request], capacity: int) -> int:
    """GreedyDual-Size with frequency (Cherkasova 1998) for equal sizes and costs; frequencies are never forgotten."""
    frequency: dict[int, int] = {}
    rank: dict[int, tuple[int, int]] = {}  # for each cached block: its priority and last use
    heap: list[tuple[int, int, int]] = []
    hits = time = floor = 0
    for request in requests:
        for block in reversed(request):
            time += 1
            if block in rank:
                hits += 1
            elif len(rank) >= capacity:
                while True:
                    priority, used, left = heapq.heappop(heap)
                    if rank.get(left) == (priority, used):
                        break
                del rank[left]
                floor = priority
            frequency[block] = frequency.get(block, 0) + 1
            rank[block] = (floor + frequency[block], time)
            heapq.heappush(heap, (*rank[block], block))
    return hits


def optimum(requests: Sequence[Request], capacity: int) -> int:
    """Evicts the block that is used again latest."""
    references = [block for request in requests for block in reversed(request)]
    next_use = [0] * len(references)
    upcoming: dict[int, int] = {}
    for time in range(len(references) - 1, -1, -1):
        next_use[time] = upcoming.get(references[time], len(references) + time)
        upcoming[references[time]] = time
    cached: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for time, block in enumerate(references):
        if block in cached:
            hits += 1
        elif len(cached) >= capacity:
            while True:
                used, left = heapq.heappop(heap)
                if cached.get(left) == -used:
                    break
            del cached[left]
        cached[block] = next_use[time]
        heapq.heappush(heap, (-next_use[time], block))
    return hits


# -- Quire -------------------------------------------------------------------------------------------------------------


def through_pool(policy: str) -> Callable[[Sequence[Request], int], int]:
    """Returns a function that counts a pool's hits under one of its policies.

    Each prompt is one token longer than its blocks, because the last token is never served from the cache. The pool has
    one more block to hold it.
    """

    def run(requests: Sequence[Request], capacity: int) -> int:
        group = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS)
        pool = Pool(PoolSpec(capacity + 1, (group,), eviction_policy=policy))
        hits = 0
        for number, request in enumerate(requests, 1):
            digests = b"".join(block.to_bytes(32) for block in request)
            token_count = len(request) * BLOCK_TOKENS
            allocated = pool.allocate(number, token_count + 1, digests)
            if allocated.result is Result.TOO_LONG:
                continue
            assert allocated.result is Result.OK, allocated
            matched = allocated.matched_token_count // BLOCK_TOKENS
            hits += matched
            pool.commit(number, token_count, digests[32 * matched :])
            pool.free(number)
        return hits

    return run


PAPERS: dict[str, Callable[[Sequence[Request], int], int]] = {
    "LRU": lru,
    "2Q": two_q,
    "S3-FIFO": s3_fifo,
    "GDSF": gdsf,
}
OPTIMUM = "optimum"
OURS = {f"quire {name}": through_pool(name) for name in sorted(POLICIES, key=lambda name: name != DEFAULT_POLICY)}
DEFAULT = f"quire {DEFAULT_POLICY}"


def through_session(policy: str, restarts: int) -> Callable[[Sequence[Request], int], int]:
    """Returns a function that runs the trace over the session protocol. The allocator is replaced this many times, at
    equal distances. Each new allocator rebuilds the pool from its owner's report."""

    def run(requests: Sequence[Request], capacity: int) -> int:
        group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=BLOCK_TOKENS)
        pool = InProcess(pb.PoolSpec(block_count=capacity + 1, groups=[group], eviction_policy=policy))
        replaced = {len(requests) * number // (restarts + 1) for number in range(1, restarts + 1)}
        hits = 0
        for number, request in enumerate(requests, 1):
            if len(request) <= capacity:
                digests, token_count = b"".join(block.to_bytes(32) for block in request), len(request) * BLOCK_TOKENS
                step = StepBuilder()
                step.allocate(number, token_count + 1, digests)
                matched = pool.step(step).grows[0].matched_token_count // BLOCK_TOKENS
                hits += matched
                step = StepBuilder()
                step.commit(number, token_count, digests[32 * matched :])
                pool.step(step)
                step = StepBuilder()
                step.free(number)
                pool.step(step)
            if number in replaced:
                pool.replace_allocator()
        return hits

    return run


def ratios(
    workload: str, requests: Sequence[Request], capacity: int, restarts: Sequence[int] = ()
) -> dict[str, object]:
    """Returns a row: the share of references that hit under each policy."""
    references = sum(map(len, requests))
    row: dict[str, object] = {"workload": workload, "blocks": capacity}
    restarted = {f"{DEFAULT}, {count} restarts": through_session(DEFAULT_POLICY, count) for count in restarts}
    for name, policy in {**PAPERS, OPTIMUM: optimum, **OURS, **restarted}.items():
        print(f"{workload}, {capacity} blocks: {name}", file=sys.stderr, flush=True)
        row[name] = round(policy(requests, capacity) / references, 4)
    return row


def goals(trace: Sequence[dict[str, object]], chats: Sequence[dict[str, object]]) -> list[Goal]:
    """Returns the goals of the default policy."""
    promised = []
    for row in trace:
        blocks, own, optimal = int(str(row["blocks"])), float(str(row[DEFAULT])), float(str(row[OPTIMUM]))
        others = {name: float(str(row[name])) for name in PAPERS}
        promised.append(
            Goal(f"{blocks} blocks, over LRU", own / others["LRU"] if others["LRU"] else 1.0, 0.99, "higher")
        )
        if blocks <= 10_000:
            promised.append(Goal(f"{blocks} blocks, above the best of four", own - max(others.values()), 0.0, "higher"))
        if blocks in {3_000, 10_000}:
            way = (own - others["LRU"]) / max(optimal - others["LRU"], 1e-9)
            promised.append(Goal(f"{blocks} blocks, way from LRU to the optimum", way, 0.15, "higher"))
    worst = min(float(str(row[DEFAULT])) / float(str(row[OPTIMUM])) for row in chats)
    promised.append(Goal("chats in turn, over the optimum at worst", worst, 0.5, "higher"))
    return promised


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    requests = read_trace(options.trace, options.split)
    trace = [ratios(options.trace.stem, requests, size, options.restarts) for size in options.sizes]
    capacity = CHATS_IN_POOL * CHAT_BLOCKS
    chats = [ratios(f"{count} chats in turn", chats_in_turn(count), capacity) for count in CHATS]
    publish(
        "Share of block references that hit",
        [*trace, *chats],
        goals(trace, chats),
        as_json=options.json,
        csv_file=options.csv,
    )


if __name__ == "__main__":
    main()
