"""The data of zip records: found where their writers put it, and refused where a header shifts it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.serialization import set_crc32_options

import sluice
from sluice._errors import FormatError
from support.hostile_archives import ArchiveRecord, Stream, build_archive
from support.torch_files import saved

STATE = {
    "a": torch.arange(1, 12, dtype=torch.float32),
    "b": torch.arange(5),
    "none": torch.empty(0),
    "c": torch.ones(3),
}

#: Sizes follow the data.
FOLLOW = 0x808


def descriptor(data: bytes, *, wide: bool = False, signed: bool = True) -> bytes:
    sizes = (len(data), len(data))
    return b"PK\7\x08" * signed + struct.pack("<IQQ" if wide else "<III", zlib.crc32(data), *sizes)


def built(**changes: Callable[[ArchiveRecord], Any]) -> bytes:
    """Return the records of ``saved`` in a new archive, with fields computed from each record."""
    with zipfile.ZipFile(io.BytesIO(saved(STATE))) as archive:
        records = [ArchiveRecord(name=name.encode(), data=archive.read(name)) for name in archive.namelist()]
    return build_archive(
        replace(record, **{name: change(record) for name, change in changes.items()}) for record in records
    )


def described(after: Callable[[bytes], bytes]) -> bytes:
    """Return an archive whose sizes are only after the data."""
    return built(flags=lambda _: FOLLOW, local_nbytes=lambda _: 0, after=lambda record: after(record.data))


def repacked(target: io.BytesIO, *, zip64: bool = False) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(STATE))) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            with archive.open(name, "w", force_zip64=zip64) as record:
                record.write(source.read(name))
    return target.getvalue()


def aligned(nbytes: int) -> bytes:
    settings: Any = pytest.importorskip("torch.utils.serialization").config  # from torch 2.7 on
    with settings.patch("save.storage_alignment", nbytes):
        return saved(STATE)


def without_checksums() -> bytes:
    set_crc32_options(False)
    try:
        return saved(STATE)
    finally:
        set_crc32_options(True)


HEALTHY: dict[str, Callable[[], bytes]] = {
    "torch": lambda: saved(STATE),
    "torch, no checksums": without_checksums,
    "torch, not aligned": lambda: aligned(1),
    "torch, in pages": lambda: aligned(4096),
    "zipfile": lambda: repacked(io.BytesIO()),
    "zipfile, zip64": lambda: repacked(io.BytesIO(), zip64=True),
    "zipfile, to a stream": lambda: repacked(Stream()),
    "zipfile, zip64, to a stream": lambda: repacked(Stream(), zip64=True),
    "zeros before the data": lambda: built(local_extra=lambda record: bytes(len(record.name) % 4)),
    "padding after the data": lambda: built(after=lambda record: bytes(-len(record.data) % 16)),
    "descriptor": lambda: described(descriptor),
    "wide descriptor": lambda: described(partial(descriptor, wide=True)),
    "descriptor without signature": lambda: described(partial(descriptor, signed=False)),
    "descriptor and padding": lambda: described(lambda data: descriptor(data) + bytes(5)),
    "sizes and descriptor": lambda: built(flags=lambda _: FOLLOW, after=lambda record: descriptor(record.data)),
    "the flag, but no descriptor": lambda: built(flags=lambda _: FOLLOW),
}


def remote(path: Path) -> sluice.Remote:
    """Return a copy of a file on a file system whose requests are expensive."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'sluice[remote]'")
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/f.pt", path.read_bytes())
    return sluice.Remote("/f.pt", store=filesystem)


@pytest.mark.parametrize("writer", sorted(HEALTHY))
def test_records_of_other_zip_writers_are_read(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(HEALTHY[writer]())
    expected = torch.load(path, weights_only=True)
    for where in (path, remote(path)):
        found = sluice.load_state_dict(where)
        assert found.keys() == expected.keys() == STATE.keys()
        assert all(torch.equal(found[name], STATE[name]) for name in STATE)
        assert sluice.verify(where).ok


def storage_headers(content: bytes) -> Iterator[int]:
    """Yield the offset of each local header of a storage with data."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for record in archive.infolist():
            if "/data/" in record.filename and record.file_size:
                yield record.header_offset


@pytest.mark.parametrize("shift", [-8, -4, -1, 1, 4, 8, 12, 16, 24])
@pytest.mark.parametrize("writer", sorted(set(HEALTHY) - {"padding after the data"}))
def test_a_local_header_of_the_wrong_length_is_refused(tmp_path: Path, writer: str, shift: int) -> None:
    content = HEALTHY[writer]()
    path = tmp_path / "f.pt"
    for header in storage_headers(content):
        damaged = bytearray(content)
        (length,) = struct.unpack_from("<H", content, header + 28)
        if length + shift < 0:
            continue
        struct.pack_into("<H", damaged, header + 28, length + shift)
        path.write_bytes(damaged)
        for where, file in ((path, str(path)), (remote(path), "memory:///f.pt")):
            with pytest.raises(FormatError, match=r"record '.*/data/\d'") as caught:
                sluice.load_state_dict(where)
            assert caught.value.file == file
            assert None not in {caught.value.offset, caught.value.expected, caught.value.found}
            assert not sluice.verify(where).ok


@given(st.binary(min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 20))
def test_shifted_data_with_padding_is_refused_unless_it_is_equal(data: bytes, shift: int, padding: int) -> None:
    """A shift by exactly the padding of an archive without descriptors ends at the next header, and is not noticed."""
    storage = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with zipfile.ZipFile(io.BytesIO(saved({"w": storage}))) as archive:
        records = [ArchiveRecord(name=name.encode(), data=archive.read(name)) for name in archive.namelist()]
    padded = [replace(one, after=b"\1" * padding) if one.name.endswith(b"/data/0") else one for one in records]
    content = bytearray(build_archive(padded))
    (header,) = storage_headers(bytes(content))
    assert torch.equal(sluice.load_state_dict(io.BytesIO(content))["w"], storage)
    struct.pack_into("<H", content, header + 28, shift)
    try:
        found = sluice.load_state_dict(io.BytesIO(content))
    except FormatError:
        return
    assert shift == padding or torch.equal(found["w"], storage)
