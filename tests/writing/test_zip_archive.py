"""Zip archives with records written in any order, and CRCs of records in pieces."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sluice.writing.zip_archive import Archive


@given(st.lists(st.binary(max_size=300), max_size=6), st.randoms(use_true_random=False))
def test_pieces_in_any_order_make_an_archive_that_zipfile_reads(contents: list[bytes], chance: random.Random) -> None:
    archive = Archive("top")
    numbers = [archive.add(f"data/{i}", len(content)) for i, content in enumerate(contents)]
    pieces = []
    for number, content in zip(numbers, contents, strict=True):
        cuts = sorted({0, len(content), *(chance.randint(0, len(content)) for _ in range(4))})
        pieces += [(number, first, content[first:last]) for first, last in pairwise(cuts)]
    chance.shuffle(pieces)
    out = bytearray(archive.end)
    for number, at, piece in pieces:
        archive.account(number, at, piece)
        start = archive.data(number) + at
        out[start : start + len(piece)] = piece
    for number in numbers:
        assert archive.data(number) % 64 == 0
        header = archive.header(number)
        out[archive.header_offset(number) : archive.header_offset(number) + len(header)] = header
    out += b"".join(archive.directory())
    with zipfile.ZipFile(io.BytesIO(bytes(out))) as read:
        assert [read.read(f"top/data/{i}") for i in range(len(contents))] == contents
        assert [info.CRC for info in read.infolist()] == [zlib.crc32(content) for content in contents]


def test_sizes_and_offsets_beyond_32_bits_are_in_zip64_fields(tmp_path: Path) -> None:
    archive = Archive("top")
    archive.add("data/0", 5 << 30)
    late = archive.add("data/1", 3)
    archive.account(late, 0, b"abc")
    with open(tmp_path / "sparse.zip", "wb+") as file:
        file.seek(archive.end)
        file.writelines(archive.directory())
        with zipfile.ZipFile(file) as read:
            first, second = read.infolist()
    assert (first.file_size, second.file_size) == (5 << 30, 3)
    assert zlib.crc32(b"abc") == second.CRC
    assert archive.header(0).count((5 << 30).to_bytes(8, "little")) == 2
    assert archive.data(late) % 64 == 0
    assert (first.header_offset, second.header_offset) == (0, archive.header_offset(late))


def test_a_record_of_the_largest_32_bit_size_escapes() -> None:
    archive = Archive("top")
    small = archive.add("s", 0xFFFFFFFE)
    large = archive.add("l", 0xFFFFFFFF)
    assert b"\x01\x00\x10\x00" not in archive.header(small)
    assert b"\x01\x00\x10\x00" in archive.header(large)
