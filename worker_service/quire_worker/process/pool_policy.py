"""Options for the worker's pool besides its size: quotas, the eviction policy, and blocks reserved for running
samples. Also the pool's description for the allocator, from these options and the model.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.types import PoolSpec, Quota

if TYPE_CHECKING:  # These modules load torch, and options are read before torch is loaded.
    from quire_worker.cache import KVCache
    from quire_worker.model.paged_model import PagedModel

_LIMITS = {"held": "held_blocks_max", "cached": "cached_blocks_max"}


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the pool's policy, which the allocator enforces."""
    policy = parser.add_argument_group("policy of the pool, which the allocator enforces")
    policy.add_argument(
        "--quota",
        action="append",
        type=quota,
        default=[],
        metavar="NAMESPACE:held=N,cached=N",
        help="blocks that a namespace may hold, or have cached, or both; * is every namespace without its own quota; "
        "may be repeated",
    )
    policy.add_argument(
        "--eviction-policy",
        default="",
        metavar="NAME",
        help="eviction policy, such as lru (default: the allocator's)",
    )
    policy.add_argument(
        "--watermark-blocks",
        type=_count,
        default=0,
        metavar="N",
        help="free blocks that a new sequence must leave for running sequences (default: %(default)s)",
    )


def spec_of(options: argparse.Namespace, model: PagedModel, cache: KVCache) -> PoolSpec:
    """Returns the description of a loaded model's pool for the allocator.

    `options` is the result of `parse_arguments`.
    """
    return PoolSpec(
        block_count=cache.block_count,
        groups=cache.spec.groups,
        cache_layout=cache.spec.layout,
        model_fingerprint=model.fingerprint,
        chunk_token_count_max=options.max_batch_tokens,
        quotas=tuple(options.quota),
        eviction_policy=options.eviction_policy,
        watermark_block_count=options.watermark_blocks,
        block_bytes=cache.spec.bytes_per_block,
    )


def quota(text: str) -> Quota:
    """Returns the limits of `namespace:held=N,cached=N`.

    Raises:
        argparse.ArgumentTypeError: the text does not have that form.
    """
    namespace, colon, limits = text.rpartition(":")
    given = dict(limit.partition("=")[::2] for limit in limits.split(","))
    is_known = bool(colon) and given.keys() <= _LIMITS.keys() and len(given) == limits.count(",") + 1
    if not is_known or not all(count.isascii() and count.isdigit() for count in given.values()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a quota: write NAMESPACE:held=N,cached=N, or only one of the two limits"
        )
    return Quota(namespace, **{_LIMITS[name]: int(count) for name, count in given.items()})


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks")
    return int(text)
