"""Files of ``torch.save`` in memory, and comparison of their tensors with those of ``torch.load``."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._options import Limits
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Index
from support.oracles import loaded, located, same
from support.sources import MemorySource

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def saved(value: object, protocol: int = 2, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # torch calls complex32 experimental
        torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def index_of(content: bytes, limits: Limits | None = None, *, legacy: bool = False) -> Index:
    file_format = TorchLegacyFormat() if legacy else TorchZipFormat()
    return file_format.read_index(MemorySource(content), limits or Limits())


def tree_of(content: bytes, limits: Limits | None = None) -> Any:
    return index_of(content, limits).tree


def check(content: bytes, expected: Sequence[torch.Tensor]) -> None:
    """Compare the tensors of a file with those of ``torch.load``, also in their strides and what they share."""
    found = loaded(*located(content))
    assert same(found, expected)
    assert _places(found) == _places(expected)


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (tensor.stride(), tensor.storage_offset(), memory.index(place), tensor.untyped_storage().nbytes())
        for tensor, place in zip(tensors, memory, strict=True)
    ]


def filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return ``count`` elements with arbitrary bits; booleans are 0 or 1."""
    raw = torch.arange(count * ITEM_BYTES[dtype_name(dtype)], dtype=torch.int64).to(torch.uint8) * 37 + 11
    return (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def records_of(content: bytes) -> dict[str, bytes]:
    """Return the records of a zip archive by their names."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(records: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, target: io.BytesIO | None = None) -> bytes:
    """Return an archive of records as other programs write it, to ``target`` if there is one."""
    made = target or io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return made.getvalue()


def saved_big_endian(value: object) -> bytes:
    """Return a file of ``torch.save`` that is marked as big-endian."""
    return zipped(records_of(saved(value)) | {"archive/byteorder": b"big"})


def coo(indices: list[list[int]], shape: tuple[int, ...], *, coalesced: bool = False) -> bytes:
    """Return a file with a sparse tensor of any indices."""
    held, values = torch.tensor(indices), torch.zeros(len(indices[0]))
    with warnings.catch_warnings(action="ignore"):  # torch calls sparse tensors experimental
        made = torch.sparse_coo_tensor(held, values, shape, is_coalesced=coalesced, check_invariants=False)
    return saved({"w": made})


def compressed(layout: str, lines: list[int], plain: list[int], shape: tuple[int, ...]) -> bytes:
    """Return a file with a compressed sparse tensor of any indices."""
    values = torch.zeros((len(plain), 1, 1) if layout in {"sparse_bsr", "sparse_bsc"} else len(plain))
    kind = getattr(torch, layout)
    with warnings.catch_warnings(action="ignore"):
        made = torch.sparse_compressed_tensor(lines, plain, values, shape, layout=kind, check_invariants=False)
    return saved({"w": made})
