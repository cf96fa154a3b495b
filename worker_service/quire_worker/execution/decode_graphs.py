"""Decode batches replayed from CUDA graphs: the host makes one launch in place of hundreds.

A model of 32 layers makes about 15 launches per layer. At 5 us each from Python, its pass takes at least 2.4 ms on any
GPU; a replay is one launch. A graph has one batch size. So graphs are captured for a ladder of sizes. A batch runs in
the smallest graph that holds it, padded with empty sequences (`attention.decode_in_place`):

    ladder    1 2 4 8 16 24 32 40 ...          11 sequences are computed as 16

    1. captured    at start, the largest size first: smaller graphs share its memory
    2. replayed    whenever all chunks of a batch are one token; tokens, positions, slots and page tables are written to
                   the addresses that the captured launches read

A model cannot be captured if something in it waits for the device, for example a mixture of experts that asks which
experts are used. The model's passes are launched kernel by kernel, and the log says why.
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

SIZE_STEP = 8  # step between the sizes of graphs, from size 8 on; so at most 7 rows of a batch are empty

log = structlog.get_logger()
Compute: TypeAlias = Callable[[], torch.Tensor]


class Replay(NamedTuple):
    """A computation that can be repeated on new contents of the same input tensors.

    Attributes:
        run: repeats the computation.
        result: the tensor that each repetition writes its result to.
    """

    run: Callable[[], object]
    result: torch.Tensor


class Capture:
    """Captures computations as CUDA graphs. The graphs share memory, because no two graphs run at once."""

    def __init__(self) -> None:
        """Creates the shared memory pool, empty."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Replay:
        """Runs a computation, then captures it.

        Raises:
            RuntimeError: the computation does something that a CUDA graph does not support.
        """
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            compute()  # This first call creates plans and other objects. The graph must not create any objects.
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        return Replay(graph.replay, result)


class _Graph:
    """The captured pass of one batch size."""

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
        """Captures a pass over empty sequences, so no page is written."""
        model = self._model
        self._replay = capture(lambda: run(model.module, self._inputs, self._step, model.lengths))

    def logits_of(self, batch: ForwardBatch, to_come: TokensToCome | None) -> torch.Tensor:
        """Computes a batch; see `DecodeGraphs.logits_of`."""
        assert self._replay is not None, "the graph was not captured"
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
    """The graphs of one model and its cache. Only the model's thread may use them."""

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
            model: a model on one GPU. Several ranks wait for each other, and no graph supports that.
            cache: the graphs read and write its pages from now on.
            sizes: batch sizes from `ladder`, rising.
            capture: `Capture()`; without a GPU, a function that repeats a computation without a graph.
            progress: called before each size and at the end, with the sizes done, all sizes, and the next step's name.

        Raises:
            RuntimeError: the model does something that a CUDA graph does not support.
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
        """Computes a batch of decoding sequences by one replay, without waiting for the device.

        Args:
            batch: its inputs may be on the host; its pages are in the cache.
            to_come: tokens on the device that replace the batch's own.

        Returns:
            float32 `[rows, vocabulary]`, like `PagedModel.forward`; the next replay overwrites it. None if no graph
            fits: a chunk has several tokens or wants no logits, or the batch is larger than every graph.
        """
        count = batch.input_ids.shape[1]
        is_decode = all(each.query_length_max == 1 and each.sequence_count == count for each in batch.attention)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or not is_decode or batch.logits_index.shape[0] != count:
            return None
        return self._graphs[size].logits_of(batch, to_come)


def ladder(size_max: int) -> list[int]:
    """Returns the batch sizes to capture: 1, 2, 4, the multiples of 8 below `size_max`, and `size_max` itself."""
    sizes = [size for size in (1, 2, 4) if size < size_max]
    return [*sizes, *range(SIZE_STEP, size_max, SIZE_STEP), size_max] if size_max > 0 else []


def decode_graphs_of(
    model: PagedModel, cache: KVCache, size_max: int, progress: Progress | None = None
) -> DecodeGraphs | None:
    """Captures the decode graphs of a worker on a GPU. Returns None if they cannot be captured; the log says why.

    Args:
        model: the loaded model.
        cache: the model's cache.
        size_max: largest batch; 0 for no graphs.
        progress: see `DecodeGraphs`.
    """
    if model.device.type != "cuda" or not size_max:
        return None
    reason = None
    if model.rank_count > 1:
        reason = "the model's ranks wait for each other"
    elif any(group.kind is GroupKind.STATE for group in cache.spec.groups):
        reason = "the host moves the model's recurrent states"
    if reason is None:
        try:
            return DecodeGraphs(model, cache, ladder(size_max), capture=Capture(), progress=progress)
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
    log.warning("decode runs without CUDA graphs, so the host launches each kernel", reason=reason)
    return None
