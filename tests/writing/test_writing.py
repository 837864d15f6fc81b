"""Archives of pieces in any order, their checksums, and tensors that are written in place."""

from __future__ import annotations

import io
import random
import struct
import threading
import zipfile
import zlib
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice import _defaults as defaults
from sluice.writing import torch_zip
from sluice.writing.torch_zip import TorchZipWriter, moved
from sluice.writing.write_queue import Staging, chunks, write_queue


class Memory:
    def __init__(self, *, in_order: bool) -> None:
        self.content = bytearray()
        self.in_order = in_order

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        assert offset == len(self.content) or not self.in_order
        self.content += bytes(max(0, offset + len(data) - len(self.content)))
        self.content[offset : offset + len(data)] = data


@given(st.lists(st.binary(max_size=300), max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_pieces_in_any_order_make_an_archive_that_zipfile_reads(
    contents: list[bytes], chance: random.Random, in_order: bool
) -> None:
    writer, out = TorchZipWriter(b"pickle", [*map(len, contents)], in_order=in_order), Memory(in_order=in_order)
    pieces = []
    for number, content in enumerate(contents):
        cuts = sorted({0, len(content), *(chance.randint(0, len(content)) for _ in range(4))})
        pieces += [(number, first, content[first:last]) for first, last in pairwise(cuts)]
    if not in_order:
        chance.shuffle(pieces)
    for number, at, piece in pieces:
        writer.write(out.write_at, number, at, piece)
    assert writer.finish(out.write_at) == writer.file_bytes == len(out.content)
    with zipfile.ZipFile(io.BytesIO(bytes(out.content))) as read:
        for info in read.infolist():  # mapped tensors are aligned
            name_bytes, extra_bytes = struct.unpack_from("<HH", out.content, info.header_offset + 26)
            assert (info.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0
        assert [read.read(f"archive/data/{i}") for i in range(len(contents))] == contents
        assert read.read("archive/data.pkl") == b"pickle"
        found = {info.filename: info.CRC for info in read.infolist()}
    assert [found[f"archive/data/{i}"] for i in range(len(contents))] == [zlib.crc32(content) for content in contents]


def test_all_buffers_are_in_use_while_crcs_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    count, written = defaults.SAVE_BUFFERS + 2, []
    all_written = threading.Event()

    def write_at(offset: int, _: object) -> None:
        written.append(offset)
        if len(written) == count:
            all_written.set()

    def crc32(_: object) -> int:
        assert all_written.wait(10)
        return 0

    monkeypatch.setattr(torch_zip, "zlib", SimpleNamespace(crc32=crc32))
    writer = TorchZipWriter(b"", [8] * count)
    with write_queue(defaults.DIRECT_FILE_BYTES, Staging.make(1 << 20), lambda _: None) as queue:
        for number in range(count):
            queue.write(torch.zeros(2), "float32", 0, partial(writer.write, write_at, number))


@pytest.mark.parametrize(("nbytes", "escapes"), [(0xFFFFFFFE, False), (0xFFFFFFFF, True)])
def test_a_record_of_the_largest_32_bit_size_escapes(nbytes: int, escapes: bool) -> None:
    header = TorchZipWriter(b"", [nbytes])._header(4)
    assert (b"\x01\x00\x10\x00" in header) == escapes


def test_far_pieces_agree_with_zlib() -> None:
    data = random.Random(1).randbytes(1000)
    whole = zlib.crc32(data + bytes(10_000_000))
    assert moved(zlib.crc32(data), 10_000_000) ^ zlib.crc32(bytes(10_000_000)) == whole
    # It cannot check terabytes itself: the same distance in one step and in two gives the same sum.
    assert moved(97_654_321, (1 << 42) + 12_345) == moved(moved(97_654_321, 1 << 42), 12_345)


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
