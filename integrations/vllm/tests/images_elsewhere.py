"""An encoder connector for vLLM's scheduler. The connector acts as if images came from another process, without a
transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata


class ImagesElsewhere(ECConnectorBase):
    """Decides when images arrive. No encoder computes them here, and no worker loads them."""

    def __init__(self, *, are_there: Callable[[], bool]) -> None:  # without the base class's configuration
        self._are_there = are_there

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._are_there()

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Does nothing, because nothing is transferred."""

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        raise NotImplementedError("there is no worker")

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        raise NotImplementedError("there is no worker")
