"""Every format keeps the protocol: a healthy file is indexed, cut, damaged and failed in many ways."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from sluice._dtypes import dtype_name
from sluice._errors import CheckpointError, LimitError, ReadError
from sluice._options import Limits
from sluice.entries.tree import flatten
from sluice.formats.gguf.reader import GgufFormat
from sluice.formats.protocol import Checksum, Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Entry, Index
from sluice.records.geometry import contiguous_stride
from support.gguf_files import array, gguf_bytes, packed, plain, text
from support.sources import MemorySource, RecordingSource
from support.torch_files import saved

TENSORS = {
    "weight": torch.randn(512, 600, generator=torch.Generator().manual_seed(0)),
    "block.bias": torch.arange(700),
    "block.half": torch.linspace(0, 1, 1500).to(torch.bfloat16).reshape(30, 50),
    "scalar": torch.tensor(3.0),
    "empty": torch.ones(0, 4),
}

#: Bytes that reading an index may exceed those of the headers by: headers are read ahead, small gaps are read as well.
READ_AHEAD_BYTES = 256 << 10


class Case(NamedTuple):
    """A format, a healthy file with 1 MiB of data, and dtype, shape and row-major bytes of each of its tensors."""

    format: Format
    content: bytes
    expected: Mapping[str, tuple[str, tuple[int, ...], bytes]]

    def read_index(self, content: bytes | None = None, limits: Limits | None = None) -> Index:
        return self.format.read_index(MemorySource(self.content if content is None else content), limits or Limits())

    def located(self, content: bytes) -> tuple[Index, dict[int, int]]:
        """Return the index of a file and the data offset of every storage."""
        index = self.read_index(content)
        known = {number: storage.offset for number, storage in enumerate(index.storages) if storage.located}
        rest = [number for number in range(len(index.storages)) if number not in known]
        offsets = {**known, **self.format.locate(MemorySource(content), index, rest)}
        assert all(0 <= offsets[n] <= len(content) - storage.nbytes for n, storage in enumerate(index.storages))
        return index, offsets

    def compare(self, content: bytes) -> None:
        """Assert that a file has all expected elements."""
        index, offsets = self.located(content)
        entries = flatten(index.tree, Limits())
        for name, (_, _, data) in self.expected.items():
            assert elements(content, index, offsets, entries[name]) == data, name

    def checksums(self, content: bytes) -> list[Checksum | CheckpointError]:
        self.read_index(content)
        return list(self.format.checksums(MemorySource(content), Limits()))

    def data_ranges(self) -> list[tuple[int, int]]:
        index, offsets = self.located(self.content)
        return [(offsets[number], offsets[number] + storage.nbytes) for number, storage in enumerate(index.storages)]


def elements(content: bytes, index: Index, offsets: Mapping[int, int], entry: Entry) -> bytes:
    """Return the elements of a dense entry in row-major order; of packed elements, the packs as they are stored."""
    assert entry.stride == contiguous_stride(entry.shape)
    (first, end), storage = entry.byte_span, index.storages[entry.storage]
    assert end <= storage.nbytes
    return content[offsets[entry.storage] :][first:end]


def of_tensors(file_format: Format, content: bytes) -> Case:
    held = {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in TENSORS.items()}
    described = {name: (dtype_name(one.dtype), tuple(one.shape), held[name]) for name, one in TENSORS.items()}
    return Case(file_format, content, described)


def gguf() -> Case:
    tensors = {"w": packed((4096, 512))[0], "b": plain(torch.arange(700)), "h": plain(torch.ones(3, 5).half())}
    dtypes = {"w": "float32", "b": "int64", "h": "float16"}
    expected = {name: (dtypes[name], tuple(shape), data) for name, (shape, _, data) in tensors.items()}
    return Case(GgufFormat(), gguf_bytes(tensors, {"texts": array(8, 2, text("ab") + text(""))}), expected)


CASES: dict[str, Callable[[], Case]] = {
    "torch-zip": lambda: of_tensors(TorchZipFormat(), saved(TENSORS)),
    "torch-legacy": lambda: of_tensors(TorchLegacyFormat(), saved(TENSORS, legacy=True)),
    "safetensors": lambda: of_tensors(SafetensorsFormat(), safetensors.torch.save(TENSORS)),
    "gguf": gguf,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    made = CASES[request.param]()
    assert sum(len(data) for _, _, data in made.expected.values()) >= 1 << 20
    return made


def refused_or(work: Callable[[], object]) -> None:
    """Allow a typed error that names the file, and no other."""
    try:
        work()
    except CheckpointError as error:
        assert error.file == MemorySource(b"").path


def test_the_index_and_the_elements(case: Case) -> None:
    source = MemorySource(case.content)
    index = case.format.read_index(source, Limits())
    assert index.format == case.format.name
    assert [(file.path, file.identity) for file in index.files] == [(source.path, source.identity)]
    found = {name: (entry.dtype, tuple(entry.shape)) for name, entry in flatten(index.tree, Limits()).items()}
    assert found == {name: (dtype, shape) for name, (dtype, shape, _) in case.expected.items()}
    assert dict(case.format.locate(source, index, [])) == {}
    case.compare(case.content)


def test_reading_the_index_reads_the_headers_and_not_the_data(case: Case) -> None:
    data_bytes = sum(end - first for first, end in case.data_ranges())
    with closing(RecordingSource(MemorySource(case.content))) as source:
        case.format.read_index(source, Limits())
    assert source.read_bytes <= len(case.content) - data_bytes + READ_AHEAD_BYTES


def test_a_file_that_is_cut_is_refused_unless_every_tensor_is_complete(case: Case) -> None:
    generator, size = random.Random(0), len(case.content)
    ends = {1, 7, 8, 9, 64, size // 2, *range(size - 24, size), *(generator.randrange(1, size) for _ in range(40))}
    for end in sorted(ends):
        refused_or(partial(case.compare, case.content[:end]))
        refused_or(partial(case.checksums, case.content[:end]))


def test_damaged_headers_raise_only_typed_errors_and_may_go_unnoticed(case: Case) -> None:
    generator, headers, position = random.Random(1), list[int](), 0
    for first, end in sorted([*case.data_ranges(), (len(case.content),) * 2]):
        headers += range(position, first)
        position = max(position, end)
    for _ in range(100):
        damaged = bytearray(case.content)
        damaged[generator.choice(headers)] ^= 1 << generator.randrange(8)
        refused_or(partial(case.located, bytes(damaged)))


@pytest.mark.parametrize("name", ["entries", "header_bytes", "name_bytes"])
def test_limits_are_enforced(case: Case, name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(LimitError) as caught:
        case.read_index(limits=Limits(**limits))
    assert caught.value.file == MemorySource(b"").path


def test_checksums_are_those_of_the_data(case: Case) -> None:
    for checksum in case.checksums(case.content):
        assert isinstance(checksum, Checksum)
        data = case.content[checksum.offset : checksum.offset + checksum.nbytes]
        assert not checksum.crc or (len(data), zlib.crc32(data)) == (checksum.nbytes, checksum.crc), checksum.name


def test_a_read_that_the_system_fails_is_reported_as_that(case: Case) -> None:
    for number in range(1, 17):
        source = RecordingSource(MemorySource(case.content), fails_at=number)
        try:
            case.format.read_index(source, Limits())
        except ReadError:
            continue
        assert len(source.reads) < number, f"read_index must not ignore that read {number} failed"


def test_one_format_object_indexes_files_in_several_threads(case: Case) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: case.read_index(), range(4))) == [case.read_index()] * 4
