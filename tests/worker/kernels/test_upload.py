"""Uploads of host tensors to a device."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.shared.upload import upload_tensor


def test_what_is_there_already_is_not_copied_and_a_place_is_written(device: torch.device) -> None:
    there = torch.arange(5, device=device)
    assert upload_tensor(there, device) is there
    place = torch.zeros(5, dtype=torch.int64, device=device)
    assert upload_tensor(torch.arange(5), device, into=place).data_ptr() == place.data_ptr()
    assert place.tolist() == [0, 1, 2, 3, 4]
    assert upload_tensor(torch.arange(3), device).tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait_for_the_copy() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(40):  # The products take some tenths of a second.
            busy = (busy @ busy).tanh()
        sent = upload_tensor(torch.arange(7), "cuda")
        assert not stream.query(), "the copy lies behind what the device does"
    stream.synchronize()
    assert sent.tolist() == list(range(7))
