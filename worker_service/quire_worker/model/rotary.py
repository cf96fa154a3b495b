"""Rotary embeddings with frequencies that depend on the length of the request: `dynamic` and `longrope`.

transformers takes the length from the largest position of a batch, so one long request would change the text of all
other requests. Here every token has its own length: the length that `generate` would use for its request alone:

    length of a token = max(tokens that its request began with, its position + 1)

    longrope   one set of frequencies up to `original_max_position_embeddings`, another set beyond
    dynamic    the base grows with every token beyond `max_position_embeddings`

Transformers' own functions compute both rotations. At load, the results are compared once with transformers' results.

So the content of a page depends on its tokens and on the length that the request began with. The page's digest covers
both. A request that began with more than `original_tokens` has an extra key in its first block. A request finds only
pages with the same rotation as its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire_worker.model.checkpoint import UnsupportedModelError

# For these model types, `generate` recomputes all keys with the long frequencies once a request outgrows the short
# frequencies. For other types, `generate` keeps the keys that it has.
_BEGINNING_AGAIN = frozenset({"phi3", "phimoe", "phi4_multimodal"})
_CHECK_TOKENS = 4  # number of tokens beyond the original length in the comparison at load
_CHECK_TOLERANCE = 1e-5
_KEY = b"rotary/1"

Tables = tuple[torch.Tensor, ...]  # cosine and sine, each [1, tokens, rotary_dim]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Effect of a request's length on the rotation of its keys, for one model.

    Attributes:
        original_tokens: all requests of at most this many tokens are rotated in the same way.
        differs_by_length: True if the rotation of longer requests depends on their lengths (`dynamic`); False if all
            longer requests are rotated in the same way (`longrope`).
        begins_again: True if a request that outgrows `original_tokens` is computed again from its first token, as if it
            had begun with the new length; False if only its new tokens are rotated for the new lengths.
    """

    original_tokens: int
    differs_by_length: bool
    begins_again: bool

    def key_of(self, begun_with: int) -> bytes:
        """Returns the extra key in the first block of a request that began with `begun_with` tokens; may be empty."""
        if begun_with <= self.original_tokens:
            return b""
        return _KEY + (begun_with.to_bytes(4, "little") if self.differs_by_length else b"")

    def is_outgrown(self, begun_with: int, token_count: int) -> bool:
        """Returns whether a request of `token_count` tokens has to be recomputed, because it began with fewer."""
        return self.begins_again and begun_with <= self.original_tokens < token_count


class TokenLengths:
    """The lengths that the tokens of a forward pass are rotated for. A model's rotary embeddings read the lengths here.

    `of_pass` is int64 `[tokens]` on the model's device, set before each pass. None selects transformers' own rule.
    """

    def __init__(self) -> None:
        self.of_pass: torch.Tensor | None = None


def rotation_of(config: Any) -> Rotation | None:
    """Reads from the configuration how a model's keys depend on the lengths of requests; None if they do not.

    Args:
        config: transformers' configuration of the text model.

    Raises:
        UnsupportedModelError: the keys of only some kinds of layers depend on lengths.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {_kind(entry) for entry in parameters.values() if isinstance(entry, Mapping)}
    if kinds & {"dynamic", "longrope"}:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be served: its rotary embedding of type "
            f"{' and '.join(sorted(kinds))} differs by kind of layer"
        )
    if _kind(parameters) == "dynamic":
        return Rotation(config.max_position_embeddings, differs_by_length=True, begins_again=False)
    if _kind(parameters) == "longrope":
        original = parameters["original_max_position_embeddings"]
        return Rotation(original, differs_by_length=False, begins_again=config.model_type in _BEGINNING_AGAIN)
    return None


def longest_of(config: Any) -> int | None:
    """Returns the tokens of the longest sequence; None if the configuration does not name it.

    With `dynamic` rotation that is `factor` times `max_position_embeddings`.
    """
    longest = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if longest is not None and _kind(parameters) == "dynamic":
        return int(longest * parameters["factor"])
    return longest


def rotate_by_length(model: torch.nn.Module, rotation: Rotation) -> TokenLengths:
    """Makes a model's rotary embeddings use the returned lengths, and compares the result with transformers'.

    Raises:
        UnsupportedModelError: the model has no rotary embedding, or one that this module does not support.
    """
    lengths = TokenLengths()
    found = [part for part in model.modules() if hasattr(part, "rope_type") and hasattr(part, "inv_freq")]
    for part in found:
        own = part.forward
        part.forward = _ByLength(part, own, rotation, lengths)
        _compare(part, own, rotation.original_tokens, lengths)
    if not found:
        raise UnsupportedModelError("the model has no rotary embedding whose frequencies depend on the length")
    return lengths


def _kind(parameters: Mapping[str, Any]) -> str:
    kind = str(parameters.get("rope_type") or "default")
    return "dynamic" if "dynamic" in kind else kind


@dataclass(frozen=True, slots=True)
class _ByLength:
    """Replaces the `forward` of a rotary embedding."""

    part: Any
    own: Callable[..., Tables]
    rotation: Rotation
    lengths: TokenLengths

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Tables:
        """Computes cosine and sine in the dtype of `x`, for positions `[1, tokens]`."""
        if self.lengths.of_pass is None:
            return self.own(x, position_ids)
        if self.rotation.differs_by_length:
            return self._by_own_length(x, position_ids, self.lengths.of_pass)
        return self._by_short_or_long(x, position_ids, self.lengths.of_pass)

    def _by_short_or_long(self, x: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor) -> Tables:
        """Computes short and long rotation for all tokens, and selects one rotation for each token.

        transformers chooses by the largest position. For the short rotation, positions are clamped below the original
        length. For the long one, a position of that length is appended, and its result is dropped.
        """
        original = self.rotation.original_tokens
        last = position_ids.new_full((1, 1), original)
        short = self.own(x, position_ids.clamp(max=original - 1))
        long = self.own(x, torch.cat([position_ids, last], dim=1))
        is_long = (lengths > original)[None, :, None]
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    def _by_own_length(self, x: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor) -> Tables:
        """Computes the rotation with separate frequencies for each token, `[tokens, rotary_dim / 2]`."""
        part, of_token = self.part, lengths[:, None]
        scaled, _ = ROPE_INIT_FUNCTIONS[part.rope_type](part.config, x.device, seq_len=of_token)
        kept = part.inv_freq
        part.inv_freq = torch.where(of_token > self.rotation.original_tokens, scaled, part.original_inv_freq)
        try:
            tables: Tables = inspect.unwrap(type(part).forward)(part, x, position_ids)
            return tables
        finally:
            part.inv_freq = kept


def _compare(part: Any, own: Callable[..., Tables], original: int, lengths: TokenLengths) -> None:
    """Checks that a single request, short or long, is rotated like in transformers.

    Raises:
        UnsupportedModelError: the rotation differs.
    """
    device = part.inv_freq.device
    x = torch.zeros(1, 1, 1, device=device)
    for token_count in (original, original + _CHECK_TOKENS, original):
        positions = torch.arange(token_count, device=device)[None]
        own(x, positions[:, :1])  # resets the frequencies; otherwise the frequencies of a longer request would stay
        expected = own(x, positions)
        lengths.of_pass = torch.full((token_count,), token_count, device=device)
        try:
            found = part(x, positions)
            is_close = all(
                torch.allclose(a, b, rtol=0, atol=_CHECK_TOLERANCE) for a, b in zip(found, expected, strict=True)
            )
        except (TypeError, RuntimeError) as error:
            raise UnsupportedModelError(f"{type(part).__name__} cannot be rotated by request: {error}") from error
        finally:
            lengths.of_pass = None
        if not is_close:
            raise UnsupportedModelError(
                f"{type(part).__name__} cannot be rotated by request: its results differ from transformers'"
            )
