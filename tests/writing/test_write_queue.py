"""Tensors as bytes: every element once and in row-major order, for all strides, dtypes and buffers."""

from __future__ import annotations

import torch

from sluice.writing.write_queue import Staging, chunks


def test_only_contiguous_host_tensors_of_the_same_dtype_are_written_in_place() -> None:
    staging = Staging.make(1 << 16)
    tensor = torch.arange(12.0).reshape(3, 4)
    (whole,) = chunks(tensor, "float32", staging)
    assert whole.in_place is not None
    assert whole.in_place.obj is not None
    tensor[0, 0] = 7.0
    assert bytes(whole.in_place[:4]) == torch.tensor(7.0).numpy().tobytes()
    assert all(chunk.in_place is None for chunk in chunks(tensor.t(), "float32", staging))
    assert all(chunk.in_place is None for chunk in chunks(tensor, "float16", staging))
