"""The random numbers of one sample: a stream that its seed and its place in the request decide, and nothing else."""

from __future__ import annotations

import hashlib
import secrets

import torch


def new_generator(seed: int | None, sample_index: int) -> torch.Generator:
    """Returns the stream of random numbers of one sample; on the CPU, wherever the model runs.

    Args:
        seed: of the request, 0 to 2**64 - 1; None for one that nobody can foresee.
        sample_index: which of its samples; each has a stream of its own.
    """
    if seed is None:
        seed = secrets.randbits(64)
    # torch seeds its generator with the low 32 bits only: without the hash, 1 and 2**32 + 1 would be one seed.
    digest = hashlib.sha256(b"quire/sample/1" + seed.to_bytes(8, "little") + sample_index.to_bytes(8, "little"))
    return torch.Generator().manual_seed(int.from_bytes(digest.digest()[:4], "little"))
