"""Prepares callers' prompts for a call: pure functions that both flavors share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeGuard

from quire.hashing import root_digest
from quire.sampling import SamplingParams
from quire.types import AdapterInfo, WorkerStatus

Message: TypeAlias = Mapping[str, Any]  # one chat message: `role`, `content`, and other keys that the template uses
AT_A_TIME: Final = 64  # concurrent requests of `generate_many`


def is_written(prompt: str | Sequence[int] | Sequence[Message]) -> TypeGuard[str | Sequence[Message]]:
    """Tells whether a prompt needs a tokenizer: text or a conversation, but not token ids."""
    return isinstance(prompt, str) or (bool(len(prompt)) and isinstance(prompt[0], Mapping))


def digest_root(status: WorkerStatus, adapters: Sequence[AdapterInfo], namespace: str, adapter: str) -> bytes:
    """Returns the root of the digests of a worker's prompts with this namespace and adapter.

    Raises:
        ValueError: the adapter is not loaded.
    """
    digests = {each.name: each.digest for each in adapters}
    if adapter and adapter not in digests:
        raise ValueError(
            f"no adapter named {adapter!r:.200} is loaded; loaded adapters: {', '.join(sorted(digests)) or 'none'}"
        )
    of_adapter = digests[adapter] if adapter else b""
    return root_digest(
        fingerprint=status.model_fingerprint, layout=status.cache_layout, adapter=of_adapter, namespace=namespace
    )


def left_s(timeout_s: float, since_s: float) -> float:
    """Returns the rest of a call's timeout. The call began at `since_s` of the monotonic clock."""
    return max(timeout_s - (time.monotonic() - since_s), 0.001)


def warn_of_equal_samples(params: SamplingParams) -> None:
    """Emits a warning if a request asks for several samples that cannot differ."""
    if params.n > 1 and params.temperature == 0 and params.num_beams == 1:
        warnings.warn(
            f"n={params.n} greedy samples would all have the same text; set temperature above 0, or num_beams",
            stacklevel=4,  # skips the frames of this function, generate_request, and `stream` or `generate`
        )
