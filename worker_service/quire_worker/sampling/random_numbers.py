"""The random numbers of one sample: a stream that depends only on the request's seed and the sample's index."""

from __future__ import annotations

import hashlib
import secrets

import torch


def new_generator(seed: int | None, sample_index: int) -> torch.Generator:
    """Returns the random number generator of one sample. The generator is on the CPU, also for models on a GPU.

    Args:
        seed: the request's seed, 0 to 2**64 - 1; None for a random one.
        sample_index: the sample's index in the request; each sample has its own stream.
    """
    if seed is None:
        seed = secrets.randbits(64)
    # torch seeds its generator with the low 32 bits only: without the hash, 1 and 2**32 + 1 would be the same seed.
    digest = hashlib.sha256(b"quire/sample/1" + seed.to_bytes(8, "little") + sample_index.to_bytes(8, "little"))
    return torch.Generator().manual_seed(int.from_bytes(digest.digest()[:4], "little"))
