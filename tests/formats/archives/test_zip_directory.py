"""The zip directory: unusual archives that are valid, and a typed error for every other file."""

from __future__ import annotations

import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sluice._errors import FormatError, LimitError, SluiceError
from sluice._options import Limits
from sluice.formats.archives.zip_directory import CentralDirectory, read_directory
from sluice.formats.archives.zip_records import locate_records
from sluice.sources.local import LocalFile
from support.hostile_archives import ArchiveRecord, build_archive
from support.sources import MemorySource, RecordingSource

HONEST = (
    ArchiveRecord(name=b"a/data.pkl", data=b"pickle"),
    ArchiveRecord(name=b"a/data/0", data=b"0" * 40, local_extra=b"FB" + struct.pack("<H", 6) + b"Z" * 6),
    ArchiveRecord(name=b"a/data/1", data=b""),
    ArchiveRecord(name=b"a/version", data=b"3\n"),
)


def directory_of(content: bytes, limits: Limits | None = None) -> CentralDirectory:
    return read_directory(MemorySource(content), limits or Limits())


# Valid archives; ``test_zip_records`` has more


def test_what_torch_writes_beyond_4_gib(tmp_path: Path) -> None:
    with torch.serialization.skip_data():  # a sparse file of a few KiB
        torch.save({"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.zeros(3)}, tmp_path / "f.pt")
    with closing(LocalFile(tmp_path / "f.pt")) as source:
        directory = read_directory(source, Limits())
        records = [directory.record("data/0"), directory.record("data/1")]
        assert [record.nbytes for record in records if record] == [5 << 30, 12]
        first, second = locate_records(source, [record for record in records if record])
    assert first % 64 == second % 64 == 0
    assert second > first + (5 << 30)


def test_more_records_than_16_bits_can_count() -> None:
    records = [ArchiveRecord(name=b"a/%d" % number) for number in range(66_000)]
    directory = directory_of(build_archive(records, zip64=True, entries=0xFFFF))
    assert len(directory.positions) == 66_000


# The end of the archive


@pytest.mark.parametrize("extra", [1, 21, 22, 23, 70_000, 900_000])
def test_bytes_after_the_end(extra: int) -> None:
    with pytest.raises(FormatError, match="follow the end") as caught:
        directory_of(build_archive(HONEST) + b"x" * extra)
    assert caught.value.found == f"{extra} bytes"


@pytest.mark.parametrize(
    "content",
    [
        build_archive(HONEST, comment=b"hello"),
        build_archive(HONEST, prefix=b"#!/bin/sh\n"),
        build_archive(HONEST, prefix=b"PK\3\4" + bytes(60)),
        b"#!/bin/sh\n" + build_archive(HONEST),
        b"PK\3\4" + bytes(60) + build_archive(HONEST),
        build_archive(HONEST) + build_archive(HONEST)[-22:],
        build_archive(HONEST, comment=build_archive(HONEST)),
        build_archive(HONEST, entries=3),
        build_archive(HONEST, entries=5),
        build_archive(HONEST, entries=0xFFFF),
        build_archive(HONEST, directory_offset=0),
        build_archive(HONEST, directory_offset=0xFFFFFFFF),
        build_archive(HONEST, directory_bytes=0xFFFFFFFF),
        build_archive(HONEST, directory_bytes=46),
        build_archive(HONEST, zip64=True, entries=3),
        build_archive(HONEST, zip64=True, directory_offset=1),
        build_archive(HONEST, zip64=True, directory_bytes=46),
        b"PK\6\7" + build_archive([])[-22:],  # too short for the locator that it begins with
    ],
)
def test_end_records_that_lie(content: bytes) -> None:
    with pytest.raises(FormatError):
        directory_of(content)


@pytest.mark.parametrize("position", range(4, 76))
def test_zip64_records_with_a_changed_byte(position: int) -> None:
    content = bytearray(build_archive(HONEST, zip64=True))
    at = len(content) - 98 + position
    content[at] ^= 1
    if 12 <= position < 16:  # version made by and version needed, which are not read
        assert directory_of(bytes(content))
        return
    with pytest.raises(SluiceError):
        directory_of(bytes(content))


@pytest.mark.parametrize("limit", [{"entries": 3}, {"header_bytes": 100}])
def test_a_large_directory_is_refused_before_it_is_read(limit: dict[str, int]) -> None:
    [(name, most)] = limit.items()
    source = RecordingSource(MemorySource(build_archive(HONEST, zip64=True, entries=0xFFFF)))
    with pytest.raises(LimitError, match=f"'{name}'; expected at most {most}"):
        read_directory(source, Limits(**limit))  # type: ignore[arg-type]
    assert [read.nbytes for read in source.reads] == [98]


# Entries of the directory


def with_second(**changes: Any) -> bytes:
    """Return the valid archive with one record in the middle changed."""
    first, second, *rest = HONEST
    return build_archive([first, replace(second, **changes), *rest])


@pytest.mark.parametrize(
    "name",
    [
        *(b"../x", b"a/../x", b"a/./x", b"a/..", b"/a/x", b"a//x", b"a", b"", b"/", b"b/x", b"ab/x"),
        *(b"a/x\\y", b"a\\x", b"a/x\0", b"a/\n", b"a/\x1b[0m", b"a/\xff", b"A/data/0"),
    ],
)
def test_names(name: bytes) -> None:
    with pytest.raises(FormatError):
        directory_of(with_second(name=name))
    if name[:2] != b"a/":
        return
    with pytest.raises(FormatError):  # also if it is the first
        directory_of(build_archive([ArchiveRecord(name=name)]))


def test_a_directory_whose_name_is_not_text() -> None:
    with pytest.raises(FormatError, match="not UTF-8"):
        directory_of(build_archive([ArchiveRecord(name=b"\x95/data.pkl")]))


def test_names_that_only_look_odd() -> None:
    names = ["ü/..x", "ü/x..", "ü/...", "ü/.hidden", "ü/ ", "ü/ü", "ü/C:x"]
    directory = directory_of(build_archive([ArchiveRecord(name=name.encode()) for name in names]))
    assert [record.name for record in directory.records()] == names


def test_long_names() -> None:
    limits = Limits(name_bytes=4096)
    assert directory_of(with_second(name=b"a/" + b"x" * 4094), limits)
    with pytest.raises(LimitError):
        directory_of(with_second(name=b"a/" + b"x" * 4095), limits)
    assert directory_of(with_second(name=b"a/" + b"x" * 60_000))


@pytest.mark.parametrize("name", [b"a/data.pkl", b"a/DATA.pkl"])
@pytest.mark.parametrize("position", [1, 4])
def test_two_records_of_one_name(name: bytes, position: int) -> None:
    records = list(HONEST)
    records.insert(position, ArchiveRecord(name=name, data=b"other"))
    with pytest.raises(FormatError, match="two records"):
        directory_of(build_archive(records))


@pytest.mark.parametrize("flags", [0x1, 0x20, 0x40, 0x2000])
def test_encrypted_and_patched_records(flags: int) -> None:
    refusal = directory_of(with_second(flags=flags)).unsupported
    assert refusal is not None
    assert refusal.problem == f"record 'a/data/0' is encrypted or patched (flags {flags:#x})"


def test_a_record_marked_as_a_directory() -> None:
    with pytest.raises(FormatError, match="marked as a directory"):
        directory_of(with_second(attributes=0x10))


def test_entries_of_directories_are_skipped() -> None:
    """``zip -r`` adds them to an archive that was unpacked and packed again; torch ignores them."""
    folders = [ArchiveRecord(name=name, attributes=0x10) for name in (b"a/", b"a/data/")]
    packed = directory_of(build_archive([folders[0], HONEST[0], folders[1], *HONEST[1:]]))
    assert list(packed.positions) == list(directory_of(build_archive(HONEST)).positions)
    assert packed.archive == "a"
    first = packed.record("data.pkl")
    assert first is not None
    assert first.limit == packed.headers[2]  # the entry of the second folder follows


@pytest.mark.parametrize(
    ("name", "data"), [(b"/", b""), (b"b/", b""), (b"a//", b""), (b"a/../", b""), (b"a/x", b""), (b"a/more/", b"x")]
)
def test_entries_of_odd_directories(name: bytes, data: bytes) -> None:
    with pytest.raises(FormatError):
        directory_of(build_archive([*HONEST, ArchiveRecord(name=name, data=data, attributes=0x10)]))


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": 41},
        {"stored_nbytes": 41},
        {"nbytes": 41, "stored_nbytes": 41 + 65535},  # overlaps the next
        {"nbytes": 10**6, "stored_nbytes": 10**6},
        {"nbytes": 0xFFFFFFFF, "stored_nbytes": 0xFFFFFFFF},  # without a zip64 field
        {"header": 0xFFFFFFFF},
        {"nbytes": 0xFFFFFFFF, "extra": struct.pack("<HHQ", 2, 8, 40)},
        {"nbytes": 0xFFFFFFFF, "extra": struct.pack("<HHQ", 1, 8, 41)},
        {"header": 0},  # points at another record
        {"header": 30},
        {"header": 2**31},
    ],
)
def test_sizes_and_offsets_that_lie(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        directory_of(with_second(**changes))


def test_zip64_fields_of_an_entry() -> None:
    extra = b"FB\2\0ZZ" + struct.pack("<HHQQ", 1, 16, 40, 40)
    content = with_second(nbytes=0xFFFFFFFF, stored_nbytes=0xFFFFFFFF, local_nbytes=40, extra=extra)
    directory = directory_of(content)
    assert directory.sizes[directory.positions["data/0"]] == 40


def test_bytes_that_belong_to_no_record() -> None:
    content = build_archive([replace(HONEST[0], local_extra=bytes(60_000), data=bytes(50)), *HONEST[1:]])
    assert directory_of(content)
    hidden = replace(HONEST[0], data=bytes(70_000), nbytes=50, stored_nbytes=50)
    with pytest.raises(FormatError, match="overlap or leave a gap"):
        directory_of(build_archive([hidden, *HONEST[1:]]))
    with pytest.raises(FormatError, match="does not end at"):
        directory_of(build_archive([*HONEST, replace(hidden, name=b"a/last")]))


# Local headers


def located(content: bytes) -> list[bytes]:
    """Return the data of every record through its local header."""
    source = MemorySource(content)
    records = list(read_directory(source, Limits()).records())[::-1]
    offsets = locate_records(source, records)
    return [source.read_at(offset, record.nbytes) for offset, record in zip(offsets, records, strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_name": b"b/data/0"},
        {"local_name": b"a/data/"},
        {"local_name": b""},
        {"local_method": 8},
        {"local_flags": 0x1},
        {"local_flags": 0x40},
        {"local_nbytes": 39},
        {"local_nbytes": 0},  # allowed only if the flags state that sizes follow
        {"local_nbytes": 0xFFFFFFFF},
        {"local_nbytes": 0xFFFFFFFF, "local_extra": struct.pack("<HHQQ", 1, 16, 41, 41)},
    ],
)
def test_local_headers_that_disagree(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"local header of record 'a/data/0'"):
        located(with_second(**changes))


@pytest.mark.parametrize("threads", [True, False])
def test_many_distant_headers(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    records = [ArchiveRecord(name=b"a/%d" % number, data=bytes(150_000)) for number in range(40)]
    if not threads:
        monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert located(build_archive(records)) == 40 * [bytes(150_000)]
    records[33] = replace(records[33], local_name=b"a/xx")
    with pytest.raises(FormatError, match="'a/33'"):
        located(build_archive(records))
