"""Prefix digests: a chain of SHA-256 over token blocks.

    root     = SHA256("quire/1" | field(fingerprint) | field(layout) | field(lora) | field(namespace))
    digest_0 = SHA256(root       | uint32 token count | int32 tokens | field(extra key) ...)
    digest_i = SHA256(digest_i-1 | uint32 token count | int32 tokens | field(extra key) ...)

where field(x) is the length of x as uint32 followed by x; all numbers are little-endian. A digest names the content of
its block *and* of everything before it, for one model, cache layout, adapter and namespace. The same numbers come out
in every process and language: `docs/hash.md` has test vectors. Truncated or non-cryptographic hashes are not offered,
because a collision would hand one user the keys and values of another (CVE-2025-25183).

Computed by clients and workers. The allocator sees digests and counts, never tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 32
_VERSION = b"quire/1"


def root_digest(*, fingerprint: bytes, layout: str, lora: str = "", namespace: str = "") -> bytes:
    """Digest that every chain of one model, cache layout, adapter and namespace starts from.

    Args:
        fingerprint: what identifies the weights, as the worker reports it (`GetStatus.model_fingerprint`).
        layout: what identifies the bytes in a page, block size included (`GetStatus.cache_layout`).
        lora: name of the adapter; empty without one.
        namespace: prefixes are shared only inside one namespace.

    Returns:
        32 bytes.
    """
    state = hashlib.sha256(_VERSION)
    for part in (fingerprint, layout.encode(), lora.encode(), namespace.encode()):
        state.update(_field(part))
    return state.digest()


def block_digests(
    root: bytes, tokens: Sequence[int], block_size: int, *, extra_keys: Sequence[Iterable[bytes]] | None = None
) -> list[bytes]:
    """Digests of the full blocks of `tokens`, in order; a trailing partial block has none.

    Args:
        root: 32 bytes from `root_digest`, or the digest of the last block before `tokens` to go on from there.
        tokens: token ids, each fits a signed 32-bit integer.
        block_size: tokens per block, at least 1.
        extra_keys: per block, further bytes that its content depends on (image digests, say).

    Returns:
        `len(tokens) // block_size` digests of 32 bytes.

    Raises:
        ValueError: the root is not 32 bytes, or `block_size` is below 1.
        OverflowError: a token does not fit 32 bits.
    """
    if len(root) != DIGEST_BYTES:
        raise ValueError(f"root must be {DIGEST_BYTES} bytes, not {len(root)}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    block_count = len(tokens) // block_size
    data = _little_endian_int32(tokens[: block_count * block_size])
    head = struct.pack("<I", block_size)
    width = 4 * block_size
    digests = []
    parent = root
    for block in range(block_count):
        state = hashlib.sha256(parent)
        state.update(head)
        state.update(data[block * width : (block + 1) * width])
        for key in extra_keys[block] if extra_keys is not None else ():
            state.update(_field(key))
        parent = state.digest()
        digests.append(parent)
    return digests


def prompt_digests(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Digests of the blocks of a prompt that may be shared: all full ones except a last block that would leave nothing
    to compute, since at least one token must go through the model to get the first logits."""
    shareable = max(0, len(tokens) - 1) // block_size * block_size
    return block_digests(root, tokens[:shareable], block_size)


def split_digests(data: bytes) -> list[bytes]:
    """Concatenated digests apart again.

    Raises:
        ValueError: the length is no multiple of 32.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"digests must be a multiple of {DIGEST_BYTES} bytes, not {len(data)}")
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


def _field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _little_endian_int32(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise OverflowError(f"a token does not fit a signed 32-bit integer: {error}") from None
