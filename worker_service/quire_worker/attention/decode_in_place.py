"""Plans of decode batches of one size. The plans' tensors keep their addresses, as a CUDA graph requires.

A graph replays each launch with the addresses from its capture. So slots, page tables and the division of the work are
written to these addresses, and a smaller batch is padded with empty sequences:

    slots          12 40 7 | -1          a token whose slot is negative is not written
    kv_lengths     13 41 8 |  0          a sequence without keys attends to nothing, and its result is zeros
"""

from __future__ import annotations

import torch
from quire_kernels.flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchMLAPagedAttentionWrapper
from quire_kernels.ops.append_slots import check_slots
from quire_kernels.shared.upload import upload_tensor
from torch.nn.functional import pad

from quire_worker.attention.interface import AttentionBatch
from quire_worker.attention.triton_path import Kind, TritonAttentionPlan, page_table
from quire_worker.cache import PageSpec

NO_SLOT = -1


class DecodeInPlace(TritonAttentionPlan):
    """The plan of all layers with pages of one kind.

    Lifecycle: 1. The plan is created with empty sequences. 2. The layers call `append` and `attend` while they are
    captured; the first call of each kind of layer creates its wrapper. 3. `follow` is called before each replay.
    """

    __slots__ = ("_indices", "_indptr", "_last_page_len", "_query_indptr")

    def __init__(self, size: int, spec: PageSpec, indices: torch.Tensor, workspace: torch.Tensor) -> None:
        """Reserves the memory of a batch.

        Args:
            size: number of sequences, each with one token.
            spec: shape of the pages.
            indices: int32, with space for the pages of all sequences.
            workspace: the kernels' workspace. Plans that are not
                used at the same time may share `indices` and `workspace`.
        """
        device = workspace.device
        empty = AttentionBatch(
            query_indptr=torch.arange(1, dtype=torch.int32),
            kv_lengths=torch.zeros(0, dtype=torch.int32),
            block_tables=torch.zeros(0, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            query_length_max=0,
            kv_length_max=0,
        )
        slots = torch.full((size,), NO_SLOT, dtype=torch.int64, device=device)
        batch = filled_up(empty, size)
        super().__init__(batch, spec, page_table(batch, spec.block_size), slots, workspace)
        self._indices = indices
        self._indptr, self._query_indptr = (torch.zeros(size + 1, dtype=torch.int32, device=device) for _ in range(2))
        self._last_page_len = torch.zeros(size, dtype=torch.int32, device=device)

    def follow(self, batch: AttentionBatch) -> None:
        """Plans another batch in the same memory.

        Args:
            batch: a batch with one token per sequence, and at most `size` sequences.

        Raises:
            ValueError: a slot is outside the layers' pages, or `indices` is too small for all pages of the batch.
        """
        self.batch = filled_up(batch, self.slots.shape[0])
        for slot_count in self.checked_slot_counts:
            check_slots(batch.slot_mapping, slot_count=slot_count)
        self.table = page_table(self.batch, self.spec.block_size)
        upload_tensor(self.batch.slot_mapping, self.slots.device, into=self.slots)
        for kind, wrapper in self.wrappers.items():
            assert isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper)
            self._plan_decode(wrapper, kind)
        for kind, latents in self.latent_wrappers.items():
            self._plan_latents(latents, kind)

    def _planned(self, kind: Kind) -> BatchDecodeWithPagedKVCacheWrapper:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
        )
        self._plan_decode(wrapper, kind)
        return wrapper

    def _planned_latents(self, kind: Kind) -> BatchMLAPagedAttentionWrapper:
        wrapper = BatchMLAPagedAttentionWrapper(
            self.workspace,
            use_cuda_graph=True,
            qo_indptr=self._query_indptr,
            kv_indptr=self._indptr,
            kv_indices=self._indices,
            kv_len_arr=self._last_page_len,
        )
        self._plan_latents(wrapper, kind)
        return wrapper


def filled_up(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Returns a decode batch padded with empty sequences to `size` sequences."""
    missing = size - batch.sequence_count
    return AttentionBatch(
        query_indptr=torch.arange(size + 1, dtype=torch.int32),
        kv_lengths=pad(batch.kv_lengths, (0, missing)),
        block_tables=pad(batch.block_tables, (0, 0, 0, missing)),
        slot_mapping=pad(batch.slot_mapping, (0, missing), value=NO_SLOT),
        query_length_max=1,
        kv_length_max=batch.kv_length_max,
    )
