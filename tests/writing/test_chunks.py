"""Tensors as bytes: every element once and in row-major order, for all strides, dtypes and buffers."""

from __future__ import annotations

import pytest
import torch

from sluice._dtypes import torch_dtype
from sluice.writing.chunks import Staging, chunks


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(6 * 10 * 4, dtype=torch.float32).reshape(6, 10, 4)
    return {
        "contiguous": base,
        "transposed": base.permute(2, 0, 1),
        "strided": base[::2, 1::3],
        "expanded": base[:, :1].expand(6, 7, 4),
        "conjugate": torch.view_as_complex(base[..., :2].contiguous()).conj(),
        "negative": torch.view_as_complex(base[..., :2].contiguous()).conj().imag,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
    }


def content(tensor: torch.Tensor, dtype: str, staging: Staging) -> bytes:
    found = b""
    for chunk in chunks(tensor, dtype, staging):
        with staging.lent() as buffer:
            found += chunk.put_into(buffer) if chunk.in_place is None else chunk.in_place
    return found


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("nbytes", [64, 4096, 1 << 20])
def test_bytes_are_those_of_the_contiguous_tensor(name: str, nbytes: int) -> None:
    tensor = tensors()[name]
    dtype = str(tensor.dtype).removeprefix("torch.")
    written = content(tensor, dtype, Staging.make(nbytes))
    assert written == tensor.resolve_conj().resolve_neg().contiguous().numpy().tobytes()


def test_a_cast_is_that_of_torch() -> None:
    tensor = torch.randn(37, 11).t()
    written = content(tensor, "bfloat16", Staging.make(100))
    expected = tensor.to(torch_dtype("bfloat16")).contiguous().view(torch.int16).numpy().tobytes()
    assert written == expected


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
