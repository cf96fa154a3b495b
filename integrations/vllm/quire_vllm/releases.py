"""Tested releases of vLLM, and the names in vLLM that this package needs.

vLLM's scheduler interface is not public, and names move from release to release. This module checks them when the
engine starts. A release without a needed name is refused then, and not in the middle of a request.
"""

from __future__ import annotations

import inspect
import os
from typing import Final

TESTED: Final = ("0.32.0",)
ANY_RELEASE: Final = (
    "QUIRE_VLLM_ANY_RELEASE"  # Set it to 1 to try another release. Even then, the names below are checked.
)

# Methods of vLLM's manager that the scheduler calls, with the parameters that this package's overrides have.
MANAGER_METHODS: Final = {
    "new_step_starts": (),
    "get_computed_blocks": ("request",),
    "allocate_slots": (
        "request",
        "num_new_tokens",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "delay_cache_blocks",
        "num_encoder_tokens",
        "full_sequence_must_fit",
        "reserved_blocks",
        "has_scheduled_reqs",
        "skip_zeroing_group_ids",
    ),
    "get_blocks": ("request_id",),
    "free": ("request",),
    "cache_blocks": ("request", "num_computed_tokens"),
    "estimate_cached_tokens": ("request",),
    "reset_prefix_cache": (),
    "take_events": (),
    "take_new_block_ids": (),
    "take_kv_cache_block_copies": (),
    "take_boundary_state_offloads": (),
    "prefix_cache_lookup_enabled": ("request",),
}
SCHEDULER_METHODS: Final = {
    "_ec_transfer_pending": ("request", "num_computed_tokens"),
    "_mamba_block_aligned_split": (
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    "shutdown": (),
}
BLOCK_POOL_METHODS: Final = {  # methods used for KV cache events
    "_build_block_stored_event": (
        "request",
        "block_hashes",
        "parent_block_hash",
        "start_token_idx",
        "end_token_idx",
        "block_size",
        "kv_cache_group_id",
        "extra_keys_list",
    ),
    "emit_cached_block_events": ("request", "num_cached_blocks", "block_size", "kv_cache_group_id"),
    "take_events": (),
}
FUNCTIONS: Final = {"generate_block_hash_extra_keys", "maybe_convert_block_hash"}  # in v1/core/kv_cache_utils.py
SCHEDULER_FIELDS: Final = (
    "block_size",
    "current_step",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "num_lookahead_tokens",
    "running",
    "waiting",
)
REQUEST_FIELDS: Final = (
    "block_hashes",
    "max_tokens",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_preemptions",
    "num_prompt_tokens",
    "num_tokens",
    "num_tokens_with_spec",
    "request_id",
)


class UnsupportedError(RuntimeError):
    """An engine with these settings cannot run on Quire. The message names the unsupported part and the remedy."""


def check_release() -> None:
    """Raises UnsupportedError if this vLLM release is untested or lacks a needed name."""
    from vllm import __version__
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    release = __version__.partition("+")[0]
    if release not in TESTED and os.environ.get(ANY_RELEASE) != "1":
        raise UnsupportedError(
            f"quire_vllm was tested with vLLM {', '.join(TESTED)}, but this is {release}; set {ANY_RELEASE}=1 to "
            "try it anyway"
        )
    moved = [*_moved(KVCacheManager, MANAGER_METHODS), *_moved(Scheduler, SCHEDULER_METHODS)]
    moved += _moved(BlockPool, BLOCK_POOL_METHODS)
    moved += sorted(f"kv_cache_utils.{name}" for name in FUNCTIONS if not hasattr(kv_cache_utils, name))
    given = inspect.getsource(Request.__init__) + inspect.getsource(Request)
    source = inspect.getsource(Scheduler)
    moved += [f"Scheduler.{name}" for name in SCHEDULER_FIELDS if f"self.{name}" not in source]
    moved += [f"Request.{name}" for name in REQUEST_FIELDS if name not in given]
    if moved:
        raise UnsupportedError(f"vLLM {release} lacks functions that quire_vllm needs: {', '.join(moved)}")


def _moved(owner: type, methods: dict[str, tuple[str, ...]]) -> list[str]:
    """Returns the methods that are missing or take other parameters."""
    moved = []
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != parameters:
            moved.append(f"{owner.__name__}.{name}")
    return moved
