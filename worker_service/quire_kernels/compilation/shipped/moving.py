"""The shipped specializations of the kernels that move whole blocks: one per word size, for any dtype."""

from __future__ import annotations

from quire_kernels.compilation.configurations import KernelConfiguration
from quire_kernels.ops.copy_blocks import copy_blocks_kernel
from quire_kernels.ops.swap_blocks import swap_blocks_kernel
from quire_kernels.shared.block_buffers import NUM_WARPS, WORD_TYPES, word_constexprs

MOVING = (
    *(
        KernelConfiguration(
            kernel=copy_blocks_kernel,
            name=f"words of {word_bytes}",
            signature={"table_ptr": "*i64", **dict.fromkeys(("chain_count", "buffer_count", "chunk_count"), "i32")},
            constexprs=word_constexprs(word_bytes),
            aligned=frozenset(("table_ptr",)),
            num_warps=NUM_WARPS,
        )
        for word_bytes in WORD_TYPES
    ),
    *(
        KernelConfiguration(
            kernel=swap_blocks_kernel,
            name=f"{'gather' if gather else 'scatter'} words of {word_bytes}",
            signature={"table_ptr": "*i64", **dict.fromkeys(("staging_stride", "buffer_count", "chunk_count"), "i32")},
            constexprs={**word_constexprs(word_bytes), "GATHER": gather},
            aligned=frozenset(("table_ptr",)),
            num_warps=NUM_WARPS,
        )
        for gather in (True, False)
        for word_bytes in WORD_TYPES
    ),
)
