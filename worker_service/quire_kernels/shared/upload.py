"""Copies of host tensors to a device through pinned memory, so that the host does not wait for the copy.

Torch keeps a pinned block until the copy from it is done, even without other references.
"""

from __future__ import annotations

import torch


def upload_tensor(
    tensor: torch.Tensor, device: torch.device | str, *, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns a tensor on a device.

    Args:
        tensor: on any device; returned unchanged if it is on `device` already.
        device: the result's device.
        into: a tensor of the same shape on `device`, which is written and returned; None allocates a new one.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    if into is not None:
        return into.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)
