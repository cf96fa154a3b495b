"""Prefix digests: SHA-256 of everything up to the end of a block.

    root     = SHA256("quire/2" | field(fingerprint) | field(layout) | field(adapter) | field(namespace))
    digest_i = SHA256(root | uint32 block size | int32 tokens of the blocks 0 to i)

where field(x) is the length of x as uint32 followed by x. All numbers are little-endian. One running hash gives all
digests of a prompt, at a third of the cost of hashing each digest into the next. A block `k` with extra keys restarts
the hash from a new root. The new root contains `digest_(k-1)`, or the old root if `k` is the first block:

    root'    = SHA256("quire/2/keys" | digest_(k-1) | field(extra key) ...)
    digest_i = SHA256(root' | uint32 block size | int32 tokens of the blocks k to i)

A digest identifies the content of its block *and* of everything before it, for one model, cache layout, adapter and
namespace. Placeholder tokens of two images are equal, so `multimodal_keys` makes extra keys that differ. Every process
and language computes the same digests: `docs/hash.md` has test vectors. Truncated or non-cryptographic hashes are not
offered, because a collision would give one user the keys and values of another (CVE-2025-25183).

Clients and workers compute digests. The allocator sees digests and counts, never tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from quire._numbers import require_integer

# Shared with the core: scripts/shared_values.py
DIGEST_BYTES: Final = 32
FOREIGN_DIGEST_BYTES: Final = 16  # length of other engines' digests. On the wire these digests are padded with zeros.
CONTENT_ID_BYTES_MAX: Final = 128
_TOKENS_MAX: Final = 2**31 - 1  # limit of positions and counts, because offsets are packed as int32
_BLOCK_SIZE_MAX: Final = 2**32 - 1
_PACKED_TOKENS: Final = 2_048  # tokens per struct call. The arguments of a whole prompt would not fit the CPU cache.
_VERSION: Final = b"quire/2"
_KEYS: Final = b"quire/2/keys"
_MULTIMODAL: Final = b"mm/1"
_SALT: Final = b"salt/1"


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, a sound or the like. The item fills the placeholder tokens `[first_token, first_token + token_count)`.

    Attributes:
        content_id: 1 to 128 bytes that identify the model's input, after resizing or resampling, such as its SHA-256.
        first_token: index of its first token in the prompt.
        token_count: number of its tokens, at least 1.

    Raises:
        ValueError: an attribute is out of range.
    """

    content_id: bytes
    first_token: int
    token_count: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.content_id) <= CONTENT_ID_BYTES_MAX:
            raise ValueError(f"content_id must be 1 to {CONTENT_ID_BYTES_MAX} bytes, not {len(self.content_id)}")
        require_integer("first_token", self.first_token, 0, _TOKENS_MAX)
        require_integer("token_count", self.token_count, 1, _TOKENS_MAX)

    @property
    def end(self) -> int:
        """Returns the index of the first token behind the item."""
        return self.first_token + self.token_count


def root_digest(*, fingerprint: bytes, layout: str, adapter: bytes = b"", namespace: str = "") -> bytes:
    """Returns the root of all digests of one model, cache layout, adapter and namespace.

    Args:
        fingerprint: identifies the weights, as the worker reports it (`GetStatus.model_fingerprint`).
        layout: identifies the layout of a page, including the block size (`GetStatus.cache_layout`).
        adapter: SHA-256 of the adapter's weights; empty without one. A name would not suffice: a changed adapter under
            the same name would hit the old one's blocks.
        namespace: prefixes are shared only inside one namespace. The namespace acts as a salt: a caller that does not
            know it cannot compute these digests.

    Returns:
        32 bytes.

    Raises:
        ValueError: `adapter` is neither empty nor 32 bytes.
    """
    if len(adapter) not in (0, DIGEST_BYTES):
        raise ValueError(
            f"adapter must be the SHA-256 of the adapter's weights, {DIGEST_BYTES} bytes, or empty, not {len(adapter)}"
        )
    state = hashlib.sha256(_VERSION)
    for part in (fingerprint, layout.encode(), adapter, namespace.encode()):
        state.update(_field(part))
    return state.digest()


def salted_root(root: bytes, salt: str) -> bytes:
    """Returns the root of digests for requests with a cache salt. Without a salt it is `root` itself.

    The salt acts as an extra key of the first block, so chains of different salts have no digest in common.
    """
    return root if not salt else hashlib.sha256(_KEYS + root + _field(_SALT + salt.encode())).digest()


class DigestChain:
    """Computes digests of tokens that become known gradually, as in decoding. A fork continues with a copy.

    Args:
        root: 32 bytes from `root_digest`.
        block_size: tokens per block, at least 1.

    Raises:
        ValueError: the root is not 32 bytes, or `block_size` is below 1.
    """

    __slots__ = ("_block_size", "_last", "_state")

    def __init__(self, root: bytes, block_size: int) -> None:
        if len(root) != DIGEST_BYTES:
            raise ValueError(f"root must be {DIGEST_BYTES} bytes, not {len(root)}")
        require_integer("block_size", block_size, 1, _BLOCK_SIZE_MAX)
        self._block_size = block_size
        self._last = bytes(root)
        self._state = self._begin(self._last)

    def extend(self, tokens: Sequence[int], *, extra_keys: Sequence[Iterable[bytes]] | None = None) -> list[bytes]:
        """Returns the digests of the next blocks.

        Args:
            tokens: tokens of whole blocks. Each token fits a signed 32-bit integer. An array of int32 (`array("i")`,
                numpy) is fastest.
            extra_keys: per block, further bytes that its content depends on, such as the keys of `multimodal_keys`.

        Returns:
            One digest of 32 bytes per block.

        Raises:
            ValueError: the tokens end inside a block, or `extra_keys` has fewer entries than there are blocks.
            OverflowError: a token does not fit 32 bits. The chain is then unchanged.
        """
        count, rest = divmod(len(tokens), self._block_size)
        if rest:
            raise ValueError(
                f"the number of tokens must be a multiple of the block size {self._block_size}, not {len(tokens)}"
            )
        if extra_keys is not None and len(extra_keys) < count:
            raise ValueError(
                f"extra_keys must have an entry for each of the {count} full blocks, not {len(extra_keys)}"
            )
        blocks = struct.iter_unpack(f"{4 * self._block_size}s", _int32_bytes(tokens))
        digests: list[bytes] = []
        if extra_keys is None:
            update, digest, append = self._state.update, self._state.digest, digests.append
            for (data,) in blocks:
                update(data)
                append(digest())
        else:
            for (data,), keys in zip(blocks, extra_keys, strict=False):
                fields = b"".join(map(_field, keys))
                if fields:
                    last = digests[-1] if digests else self._last
                    self._state = self._begin(hashlib.sha256(_KEYS + last + fields).digest())
                self._state.update(data)
                digests.append(self._state.digest())
        if digests:
            self._last = digests[-1]
        return digests

    def copy(self) -> DigestChain:
        """Returns another chain that continues from the same point."""
        other = object.__new__(DigestChain)
        other._block_size, other._last, other._state = self._block_size, self._last, self._state.copy()
        return other

    def _begin(self, root: bytes) -> hashlib._Hash:
        return hashlib.sha256(root + struct.pack("<I", self._block_size))


def block_digests(
    root: bytes, tokens: Sequence[int], block_size: int, *, extra_keys: Sequence[Iterable[bytes]] | None = None
) -> list[bytes]:
    """Returns the digests of the full blocks of `tokens`, in order; a trailing partial block has none.

    Args:
        root: 32 bytes from `root_digest`.
        tokens: all tokens from the first one on. Each token fits a signed 32-bit integer. An array of int32
            (`array("i")`, numpy) is fastest.
        block_size: tokens per block, at least 1.
        extra_keys: per block, further bytes that its content depends on, such as the keys of `multimodal_keys`.

    Returns:
        `len(tokens) // block_size` digests of 32 bytes. Use a `DigestChain` to continue later.

    Raises:
        ValueError: the root is not 32 bytes, `block_size` is below 1, or `extra_keys` has fewer entries than there are
            full blocks.
        OverflowError: a token does not fit 32 bits.
    """
    chain = DigestChain(root, block_size)
    whole = len(tokens) // block_size * block_size
    return chain.extend(tokens if whole == len(tokens) else tokens[:whole], extra_keys=extra_keys)


def block_digests_bytes(
    root: bytes, tokens: Sequence[int], block_size: int, *, extra_keys: Sequence[Iterable[bytes]] | None = None
) -> bytes:
    """Returns the digests of `block_digests` concatenated, as on the wire."""
    return b"".join(block_digests(root, tokens, block_size, extra_keys=extra_keys))


def prompt_digests(
    root: bytes, tokens: Sequence[int], block_size: int, *, extra_keys: Sequence[Iterable[bytes]] | None = None
) -> list[bytes]:
    """Returns the digests of a prompt's blocks that may be shared: all full blocks that leave at least one token. The
    model must compute at least one token to get the first logits."""
    require_integer("block_size", block_size, 1, _BLOCK_SIZE_MAX)
    shareable = max(0, len(tokens) - 1) // block_size * block_size
    return block_digests(root, tokens[:shareable], block_size, extra_keys=extra_keys)


def multimodal_keys(items: Iterable[MultimodalItem], token_count: int, block_size: int) -> list[tuple[bytes, ...]]:
    """Returns the extra keys of the full blocks of a prompt with images, sounds and the like.

    Every block that an item overlaps gets a key: the item's content, its length, and its start relative to the block.
    The same image at another position therefore gives another digest. To continue a chain from block `n`, pass
    `multimodal_keys(...)[n:]`.

    Args:
        items: the items, in any order.
        token_count: length of the prompt with all its placeholders.
        block_size: tokens per block, at least 1.

    Returns:
        `token_count // block_size` tuples of keys, ordered by the position of their items.

    Raises:
        ValueError: two items overlap, one reaches beyond the prompt, the prompt is longer than 2**31 - 1 tokens, or
            `block_size` is below 1.
    """
    require_integer("block_size", block_size, 1, _BLOCK_SIZE_MAX)
    require_integer("token_count", token_count, 0, _TOKENS_MAX)
    ordered = sorted(items, key=lambda item: item.first_token)
    for item, following in pairwise(ordered):
        if following.first_token < item.end:
            raise ValueError(f"the item at token {following.first_token} overlaps the one at {item.first_token}")
    if ordered and ordered[-1].end > token_count:
        raise ValueError(
            f"the item at token {ordered[-1].first_token} ends beyond the {token_count} tokens of the prompt"
        )
    keys: list[tuple[bytes, ...]] = [()] * (token_count // block_size)
    for item in ordered:
        for block in range(item.first_token // block_size, min(-(-item.end // block_size), len(keys))):
            offset = item.first_token - block * block_size
            keys[block] += (_MULTIMODAL + struct.pack("<iI", offset, item.token_count) + item.content_id,)
    return keys


def split_digests(data: bytes) -> list[bytes]:
    """Splits concatenated digests.

    Raises:
        ValueError: the length is not a multiple of 32.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"the length of digests must be a multiple of {DIGEST_BYTES} bytes, not {len(data)}")
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


def _field(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _int32_bytes(tokens: Sequence[int]) -> bytes:
    """Returns the tokens as little-endian int32. An array of this format is copied without conversion."""
    if not isinstance(tokens, list | tuple):
        with contextlib.suppress(TypeError, NotImplementedError):  # not an array, or its format is unknown to Python
            view = memoryview(tokens)  # type: ignore[arg-type]
            if view.format in ("i", "l") and view.itemsize == 4 and sys.byteorder == "little":
                return view.tobytes()
            tokens = view.tolist()
    if sys.byteorder == "little":
        with contextlib.suppress(OverflowError, TypeError):  # A token is negative, or not an integer.
            packed = array("I", tokens).tobytes()
            if packed[3::4].isascii():  # Every token is below 2**31. This loop takes half the time of structs.
                return packed
    parts = (tokens[first : first + _PACKED_TOKENS] for first in range(0, len(tokens), _PACKED_TOKENS))
    try:
        return b"".join([struct.pack(f"<{len(part)}i", *part) for part in parts])
    except struct.error as error:
        raise OverflowError(f"a token does not fit a signed 32-bit integer: {error}") from None
