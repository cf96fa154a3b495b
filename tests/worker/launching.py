"""Makes an engine on a CPU launch passes and finish them later, as on a GPU. The CPU computes each pass at launch."""

from __future__ import annotations

import pytest
import torch
from quire_worker.attention import CpuPagedAttention
from quire_worker.sampling.choice import are_finite


def likeliest(_: CpuPagedAttention, logits: torch.Tensor) -> torch.Tensor:
    """Implements `PagedAttention.likeliest` on a CPU."""
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int32)
    return torch.where(are_finite(logits), logits.argmax(dim=-1), -1).to(torch.int32)


def launch_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines that are created from now on launch every pass that can be launched ahead."""
    monkeypatch.setattr(CpuPagedAttention, "likeliest", likeliest)
