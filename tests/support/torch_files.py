"""Files of ``torch.save`` in memory, and comparison of their indexes with ``torch.load``."""

from __future__ import annotations

import collections
import io
import warnings
import zipfile
from typing import Any

import pytest
import torch

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._options import Limits
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Entry, Index, TorchSize, TorchText
from sluice.sources.protocol import Source
from support.sources import MemorySource

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def saved(value: object, protocol: int = 2, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def index_of(content: bytes, limits: Limits | None = None, *, legacy: bool = False) -> Index:
    file_format = TorchLegacyFormat() if legacy else TorchZipFormat()
    return file_format.read_index(MemorySource(content), limits or Limits())


def tree_of(content: bytes, limits: Limits | None = None) -> Any:
    return index_of(content, limits).tree


class Comparison:
    """Compares an index with the result of ``torch.load``."""

    def __init__(self, source: Source, index: Index) -> None:
        self._source = source
        self._index = index
        self._offsets = TorchZipFormat().locate(source, index, range(len(index.storages)))
        self._pointers: dict[int, int] = {}
        self._objects: dict[int, torch.Tensor] = {}

    def check(self, found: object, expected: object) -> None:
        if isinstance(expected, torch.Tensor):
            assert isinstance(found, Entry)
            self._check_tensor(found, expected)
        elif isinstance(expected, dict):
            assert isinstance(found, dict)
            assert type(found) is type(expected) or type(expected) is collections.defaultdict
            assert list(found) == list(expected)
            for key, value in expected.items():
                self.check(found[key], value)
            self.check(getattr(found, "_metadata", None), getattr(expected, "_metadata", None))
        elif isinstance(expected, (list, tuple)):
            assert type(found) is (TorchSize if isinstance(expected, torch.Size) else type(expected))
            assert isinstance(found, (list, tuple))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                self.check(one, other)
        elif isinstance(expected, (torch.dtype, torch.device, torch.layout)):
            assert type(found) is TorchText
            assert found == str(expected)
        else:
            assert type(found) is type(expected)
            assert found == expected

    def _check_tensor(self, entry: Entry, tensor: torch.Tensor) -> None:
        assert (entry.dtype, entry.shape) == (dtype_name(tensor.dtype), tuple(tensor.shape))
        assert (entry.stride, entry.storage_offset) == (tensor.stride(), tensor.storage_offset())
        assert entry.parameter == isinstance(tensor, torch.nn.Parameter)
        assert entry.requires_grad == tensor.requires_grad
        assert entry.math_bits == (("conj",) if tensor.is_conj() else ()) + (("neg",) if tensor.is_neg() else ())
        self.check(entry.attributes or {}, vars(tensor))
        assert self._objects.setdefault(id(entry), tensor) is tensor  # one object if torch has one
        record = self._index.storages[entry.storage]
        memory = tensor.untyped_storage()
        assert record.nbytes == memory.nbytes()
        if record.nbytes:
            assert self._pointers.setdefault(entry.storage, memory.data_ptr()) == memory.data_ptr()
            assert len(set(self._pointers.values())) == len(self._pointers)
        stored = self._source.read_at(self._offsets[entry.storage], record.nbytes)
        assert stored == bytes(torch.empty(0, dtype=torch.uint8).set_(memory).tolist())


def check(value: object, protocol: int = 2) -> Index:
    """Save a value, compare its index with the result of ``torch.load``, and return the index."""
    content = saved(value, protocol)
    # torch's own safe unpickler reads protocol 2 only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        expected = torch.load(io.BytesIO(content), weights_only=protocol == 2)
    source = MemorySource(content)
    index = TorchZipFormat().read_index(source, Limits())
    Comparison(source, index).check(index.tree, expected)
    return index


def filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return ``count`` elements with arbitrary bits; booleans are 0 or 1."""
    raw = torch.arange(count * ITEM_BYTES[dtype_name(dtype)], dtype=torch.int64).to(torch.uint8) * 37 + 11
    return (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def saved_big_endian(value: object) -> bytes:
    """Return a file of ``torch.save`` that is marked as big-endian."""
    content = io.BytesIO()
    torch.save(value, content)
    changed = io.BytesIO()
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(changed, "w") as new:
        for record in old.infolist():
            data = b"big" if record.filename.endswith("byteorder") else old.read(record)
            new.writestr(record.filename, data)
    return changed.getvalue()
