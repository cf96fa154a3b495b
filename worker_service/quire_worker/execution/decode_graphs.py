"""Decode batches replayed from CUDA graphs: one launch from the host, where a pass has hundreds.

A model of 32 layers makes some 15 launches a layer. At 5 us each from Python, its pass takes 2.4 ms whatever the GPU
does meanwhile; a replay takes one. A graph is of one batch size. So there is a ladder of sizes, and a batch takes the
smallest graph that holds it, filled up with empty sequences (`attention.decode_in_place`):

    ladder    1 2 4 8 16 24 32 40 ...          11 sequences are computed as 16

    1. captured    at start, the largest size first: smaller ones share its memory
    2. replayed    whenever all chunks of a batch are one token; tokens, positions, slots and page tables are written to
                   where the captured launches read them

A model that cannot be captured, because something in it waits for the device (a mixture of experts that asks which of
them are used, say), is computed launch by launch as before, and the log says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import structlog
import torch
from quire.types import GroupKind
from quire_kernels.compilation.warmup import Progress
from quire_kernels.shared.upload import upload_tensor

from quire_worker.attention.decode_in_place import DecodeInPlace
from quire_worker.attention.triton_path import TritonPagedAttention
from quire_worker.cache import KVCache
from quire_worker.execution.launched import TokensToCome
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.transformers_seam import PagedStep, run

SIZE_STEP = 8  # from 8 on, so that at most 7 rows of a batch are empty

log = structlog.get_logger()
Compute: TypeAlias = Callable[[], torch.Tensor]


class Replay(NamedTuple):
    """A computation that can be repeated on what its inputs hold by then.

    Attributes:
        run: repeats it.
        result: where it leaves its result.
    """

    run: Callable[[], object]
    result: torch.Tensor


class Capture:
    """Captures computations as CUDA graphs, which share their memory because no two of them run at once."""

    def __init__(self) -> None:
        """Begins with no memory."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Replay:
        """Runs a computation, then captures it.

        Raises:
            RuntimeError: it does what no graph can hold.
        """
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            compute()  # what is made at a first call, such as plans, belongs to no graph
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        return Replay(graph.replay, result)


class _Graph:
    """A batch size, captured."""

    def __init__(
        self, model: PagedModel, cache: KVCache, size: int, indices: Sequence[torch.Tensor], workspace: torch.Tensor
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=model.device)

        self._inputs = ForwardBatch(
            zeros(1, size), zeros(1, size), torch.arange(size, device=model.device), zeros(size) + 1, (),
            spans=torch.ones(3, size, dtype=torch.int64), state_blocks=zeros(0, size),
        )  # fmt: skip
        self._groups = [group for group, _ in cache.kinds]
        self._plans = [
            DecodeInPlace(size, pages, room, workspace) for room, (_, pages) in zip(indices, cache.kinds, strict=True)
        ]
        self._step = PagedStep(self._plans, cache.layers)
        self._model = model
        self._replay: Replay | None = None

    def capture(self, capture: Callable[[Compute], Replay]) -> None:
        """Captures the pass, of empty sequences: no page is written."""
        model = self._model
        self._replay = capture(lambda: run(model.module, self._inputs, self._step, model.lengths))

    def logits_of(self, batch: ForwardBatch, to_come: TokensToCome | None) -> torch.Tensor:
        """Computes a batch; see `DecodeGraphs.logits_of`."""
        assert self._replay is not None, "it was not captured"
        count = batch.input_ids.shape[1]
        for place, given in (
            (self._inputs.input_ids[0], batch.input_ids[0]),
            (self._inputs.position_ids[0], batch.position_ids[0]),
            (self._inputs.lengths, batch.lengths),
        ):
            upload_tensor(given, place.device, into=place[:count])
        if to_come is not None:
            to_come.put_into(self._inputs.input_ids[0])
        for group, plan in zip(self._groups, self._plans, strict=True):
            plan.follow(batch.attention[group])
        self._replay.run()
        return self._replay.result[:count]


class DecodeGraphs:
    """The graphs of one model and its cache. For the model's thread alone."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        sizes: Sequence[int],
        *,
        capture: Callable[[Compute], Replay],
        progress: Progress | None = None,
    ) -> None:
        """Captures every size.

        Args:
            model: on a GPU, alone: ranks wait for each other, which no graph holds.
            cache: whose pages the graphs read and write from now on.
            sizes: of `ladder`, rising.
            capture: `Capture()`; elsewhere than on a GPU, what repeats a computation without a graph.
            progress: called before each size with those done, all of them, and what comes next; and at the end.

        Raises:
            RuntimeError: the model does what no graph can hold.
        """
        attention = model.attention
        assert isinstance(attention, TritonPagedAttention)
        pages_max = sizes[-1] * -(-cache.sequence_tokens_max(1) // cache.spec.block_size)
        indices = [torch.zeros(pages_max, dtype=torch.int32, device=model.device) for _ in cache.kinds]
        self._graphs: dict[int, _Graph] = {}
        for done, size in enumerate(reversed(sizes)):
            if progress is not None:
                progress(done, len(sizes), f"decode of {size}")
            graph = _Graph(model, cache, size, indices, attention.workspace)
            graph.capture(capture)
            self._graphs[size] = graph
        self._sizes = tuple(sizes)
        if progress is not None:
            progress(len(sizes), len(sizes), "done")

    def logits_of(self, batch: ForwardBatch, to_come: TokensToCome | None = None) -> torch.Tensor | None:
        """Computes a batch of decoding sequences by one replay. Waits for nothing.

        Args:
            batch: its inputs may be on the host; its pages are those of the cache.
            to_come: tokens that take the place of the batch's own, on the device.

        Returns:
            float32 `[rows, vocabulary]`, as `PagedModel.forward`, until the next replay writes over it. None where no
            graph takes the batch: a chunk of it has several tokens or wants no logits, or it is larger than all graphs.
        """
        count = batch.input_ids.shape[1]
        is_decode = all(each.query_length_max == 1 and each.sequence_count == count for each in batch.attention)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or not is_decode or batch.logits_index.shape[0] != count:
            return None
        return self._graphs[size].logits_of(batch, to_come)


def ladder(size_max: int) -> list[int]:
    """Returns the batch sizes to capture up to one, which is among them: 1, 2, 4, 8, and every eighth after that."""
    sizes = [size for size in (1, 2, 4) if size < size_max]
    return [*sizes, *range(SIZE_STEP, size_max, SIZE_STEP), size_max] if size_max > 0 else []


def decode_graphs_of(
    model: PagedModel, cache: KVCache, size_max: int, progress: Progress | None = None
) -> DecodeGraphs | None:
    """Captures what a worker on a GPU decodes with; None where nothing can be captured, which the log explains.

    Args:
        model: loaded.
        cache: its own.
        size_max: largest batch; 0 for no graphs.
        progress: see `DecodeGraphs`.
    """
    if model.device.type != "cuda" or not size_max:
        return None
    reason = None
    if model.rank_count > 1:
        reason = "its ranks wait for each other"
    elif any(group.kind is GroupKind.STATE for group in cache.spec.groups):
        reason = "its recurrent states are moved by the host"
    if reason is None:
        try:
            return DecodeGraphs(model, cache, ladder(size_max), capture=Capture(), progress=progress)
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
    log.warning("decode is not captured: each pass is launched by the host", reason=reason)
    return None
