"""The batches that are measured on a GPU, the memory and operations that they need, and the rules that leave some out.

    memory      keys and values, queries, results of two sides, and `FIXED_BYTES` must fit. A side with dense keys needs
                a second copy of the keys, and, in latent attention, the scores.
    operations  A launch of more than `operations_max` would take as long as all other launches.
    flex        Flex attention's blocks are pages. Two cases are left out: pages of 16 keys, because the kernels are
                made for 64 and more; and pools of 2^31 elements and more, because the offsets have 32 bits. Each
                remaining batch costs a compilation.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

ELEMENT_BYTES = 2  # bfloat16
FIXED_BYTES = 6 << 30  # bytes for buffers that clear the cache, workspaces, and temporaries of comparisons
FLEX_PAGE_SIZE = 64
OPERATIONS_MAX = 3e14
WORKS = ("decode", "prefill")
BATCHES = (1, 32, 256)
CONTEXTS = (1024, 8192, 65536)
PAGE_SIZES = (16, 64)


@dataclass(frozen=True, slots=True)
class Grouped:
    """The shape of attention with query heads that share keys and values."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def key_elements(self) -> int:
        """Counts the elements of one token in the cache."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Counts the elements of one token's queries. The results have at most as many elements."""
        return self.query_heads * self.head_dim

    @property
    def pair_operations(self) -> int:
        """Counts the operations for one query token and one key that it sees, over all heads."""
        return 4 * self.query_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """The shape of attention with heads that share a latent vector and its positional part. Queries are absorbed."""

    name: str
    query_heads: int
    latent: int
    positional: int

    @property
    def key_elements(self) -> int:
        """Counts the elements of one token in the cache."""
        return self.latent + self.positional

    @property
    def query_elements(self) -> int:
        """Counts the elements of one token's queries. The results have at most as many elements."""
        return self.query_heads * (self.latent + self.positional)

    @property
    def pair_operations(self) -> int:
        """Counts the operations for one query token and one key that it sees, over all heads."""
        return 2 * self.query_heads * (2 * self.latent + self.positional)


Shape = Grouped | Latent
SHAPES: dict[str, Shape] = {
    "llama": Grouped("Llama-8B, 32/8 heads of 128", 32, 8, 128),
    "qwen3": Grouped("GQA 5, 40/8 heads of 128", 40, 8, 128),
    "mla": Latent("MLA, 128 heads of 512+64", 128, 512, 64),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch of sequences of equal length: decode of their newest tokens, or prefill of whole prompts."""

    work: str  # one of WORKS
    shape: Shape
    batch: int
    context: int
    page_size: int

    @property
    def title(self) -> str:
        """Returns the name of the case in tables."""
        work = "MLA decode" if isinstance(self.shape, Latent) else self.work
        return f"{work}, {self.shape.name}, batch {self.batch}, context {self.context}, page {self.page_size}"

    @property
    def queries(self) -> int:
        """Counts the queries of one sequence."""
        return self.context if self.work == "prefill" else 1

    @property
    def operations(self) -> int:
        """Counts the multiplications and additions for the pairs that a causal mask leaves."""
        seen = self.queries * (2 * self.context - self.queries + 1) // 2
        return self.batch * seen * self.shape.pair_operations

    @property
    def key_bytes(self) -> int:
        """Counts the bytes of keys and values that the case reads."""
        return self.batch * self.context * self.shape.key_elements * ELEMENT_BYTES

    @property
    def query_bytes(self) -> int:
        """Counts the bytes of all queries."""
        return self.batch * self.queries * self.shape.query_elements * ELEMENT_BYTES

    @property
    def moved_bytes(self) -> int:
        """Returns the bytes that a launch must read or write at least."""
        return self.key_bytes + 2 * self.query_bytes

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of memory that measuring needs, without dense keys."""
        return self.key_bytes + 4 * self.query_bytes + FIXED_BYTES

    @property
    def dense_bytes(self) -> int:
        """Returns the additional bytes that a side with dense keys needs."""
        scores = 2 * 4 * self.batch * self.context * self.shape.query_heads  # scores and exponentials, float32
        return self.key_bytes + (scores if isinstance(self.shape, Latent) else 0)


def cases(
    works: Collection[str], shapes: Collection[str], batches: Collection[int], contexts: Collection[int],
    page_sizes: Collection[int],
) -> Iterator[Case]:  # fmt: skip
    """Yields the cases of each page size, the cheapest first. Latent attention is measured only in decode."""
    for page_size in page_sizes:
        found = [
            Case(work, SHAPES[shape], batch, context, page_size)
            for work in works
            for shape in shapes
            for batch in batches
            for context in contexts
            if work == "decode" or isinstance(SHAPES[shape], Grouped)
        ]
        yield from sorted(found, key=lambda case: max(case.moved_bytes / 4e12, case.operations / 5e14))


def left_out(case: Case, *, memory_bytes: float, operations_max: float) -> str:
    """Returns why a case is not measured; empty if it is measured."""
    if case.memory_bytes > memory_bytes:
        return f"needs {_gigabytes(case.memory_bytes)}, has {_gigabytes(memory_bytes)}"
    if case.operations > operations_max:
        return f"{case.operations:.1e} operations a launch, measured up to {operations_max:.1e}"
    return ""


def side_left_out(case: Case, side: str, *, memory_bytes: float) -> str:
    """Returns why a side of a case is not measured; empty if it is measured."""
    if side in {"sdpa", "torch"} and case.memory_bytes + case.dense_bytes > memory_bytes:
        return f"dense keys need {_gigabytes(case.memory_bytes + case.dense_bytes)}, has {_gigabytes(memory_bytes)}"
    if side == "flex" and case.page_size < FLEX_PAGE_SIZE:
        return f"blocks of {case.page_size} keys"
    if side == "flex" and case.key_bytes // ELEMENT_BYTES >= 1 << 31:
        return f"pool of 2^{math.log2(case.key_bytes // ELEMENT_BYTES):.1f} elements"
    return ""


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
