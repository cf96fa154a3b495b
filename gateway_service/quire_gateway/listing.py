"""The list of requests for operators: the gateway's own entries, each with its worker's view of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from quire.errors import QuireError
from quire.views import RequestInfo

from quire_gateway.backend import Backend
from quire_gateway.entries import Entry
from quire_gateway.fleet import Fleet

WORKER_S: Final = 2.0  # seconds that a worker has to list its requests


async def listed(fleet: Fleet, entries: Sequence[Entry], now_s: float) -> dict[str, Any]:
    """Returns the requests, oldest first. `unknown` has the workers that do not answer, or do not permit the call."""
    asked = [backend for backend in fleet.backends if backend.in_flight] if entries else []
    answers = await asyncio.gather(*map(_asked, asked))
    by_id: dict[str, list[dict[str, Any]]] = {}
    for backend, infos in zip(asked, answers, strict=True):
        for info in infos or ():
            told = {"worker": backend.client.address, **_told(info)}
            by_id.setdefault(info.request_id, []).append(told)
    requests = []
    for entry in entries:
        ids = [each for each in by_id if each == entry.request_id or each.startswith(f"{entry.request_id[:60]}-")]
        at_workers = [told for each in ids for told in by_id[each]]
        requests.append({"request_id": entry.request_id, **entry.values(now_s), "at_workers": at_workers})
    unknown = [backend.client.address for backend, infos in zip(asked, answers, strict=True) if infos is None]
    return {"requests": requests, "unknown": unknown}


async def _asked(backend: Backend) -> tuple[RequestInfo, ...] | None:
    try:
        return await backend.client.requests(timeout_s=WORKER_S)
    except QuireError:
        return None


def _told(info: RequestInfo) -> dict[str, Any]:
    return {
        "state": info.state.name,
        "waits_for": None if info.wait_reason is None else info.wait_reason.name,
        "missing_blocks": info.missing_block_count,
        "behind": info.behind_request_id,
        "sequences": info.sequence_ids,
        "prompt_tokens": info.prompt_token_count,
        "cached_tokens": info.cached_token_count,
        "output_tokens": info.output_token_count,
        "blocks": info.block_count,
        "preemptions": info.preemption_count,
    }
