"""Damaged and hostile legacy files: a typed error, or the same result as torch."""

from __future__ import annotations

import io
import os
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice._errors import (
    CheckpointError,
    FormatError,
    LimitError,
    TruncatedError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice._options import Limits
from sluice.formats.detection import detect
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.records import Index
from sluice.sources.local import LocalFile
from support import torch_files
from support.hostile_archives import (
    Call,
    Global,
    Raw,
    encode,
    legacy_file,
    legacy_storage,
    pickled,
    tensor_call,
    torch_archive,
)
from support.mutations import edit, judge_torch
from support.sources import MemorySource, RecordingSource

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's own loader

SIX = {"7": (6, struct.pack("<6f", *range(6)))}
WHOLE = tensor_call(legacy_storage("7", 6), shape=(6,))


def index_of(content: bytes) -> Index:
    """Read a file as ``sluice.open`` does."""
    source = MemorySource(content)
    found = detect(source)
    assert found.name == "torch-legacy"
    return found.read_index(source, Limits())


SAVED = torch_files.saved({"base": torch.arange(12.0).reshape(3, 4), "plain": {"step": 3}}, legacy=True)


# Truncated and extended files


def test_bytes_after_the_end(tmp_path: Path) -> None:
    end = len(legacy_file({"w": WHOLE}, SIX))
    for tail in (b"\0", bytes(100_000), SAVED):
        content = legacy_file({"w": WHOLE}, SIX, trailing=tail)
        assert index_of(content).end == end
        (tmp_path / "f.pth").write_bytes(content)
        with pytest.raises(FormatError, match="bytes follow the last storage") as caught:
            sluice.open(tmp_path / "f.pth")
        assert caught.value.offset == end


@pytest.mark.parametrize("count", [5, 7, 0, 2**40, -1, -6, 2**62, -(2**63)])
def test_counts_that_lie(count: int) -> None:
    content = legacy_file({"w": WHOLE}, {"7": (count, SIX["7"][1])})
    with pytest.raises(FormatError, match="size of storage '7' does not match") as caught:
        index_of(content)
    assert (caught.value.expected, caught.value.found) == ("6 elements of float32", count)
    assert caught.value.offset == len(content) - 32


@pytest.mark.parametrize("numel", [5, 7, 2**40, 2**62, 2**2000])
def test_declared_sizes_that_lie(numel: int) -> None:
    value = {"w": tensor_call(legacy_storage("7", numel), shape=(5,))}
    with pytest.raises(FormatError, match="size of storage '7' does not match"):
        index_of(legacy_file(value, SIX))


@pytest.mark.parametrize("position", range(100))
def test_one_wrong_count_among_distant_ones(position: int) -> None:
    storages = {f"{number:03}": (5_000, bytes(20_000)) for number in range(100)}
    value = {key: tensor_call(legacy_storage(key, 5_000), shape=(5_000,)) for key in storages}
    storages[f"{position:03}"] = (5_001, bytes(20_000))
    with pytest.raises(FormatError, match=f"size of storage '{position:03}' does not match"):
        index_of(legacy_file(value, storages))


# Around the object


@pytest.mark.parametrize(
    ("part", "value", "words", "offset"),
    [
        *(("magic", magic, "magic number", 0) for magic in (0x1950A86A20F9469CFC6D, 0x1950A86A20F9469CFC6C + 2**78)),
        *(("version", version, "protocol version", 15) for version in (1000, 1002, -1, "1001", 1001.0, None, True)),
        *(("system", system, "system information", 22) for system in ((), None, "little_endian")),
    ],
)
def test_other_pickles_before_the_object(part: str, value: object, words: str, offset: int) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        index_of(legacy_file({"w": WHOLE}, SIX, **{part: value}))  # type: ignore[arg-type]  # a name chosen at run time
    assert caught.value.offset == offset


def test_system_information_without_a_byte_order() -> None:
    """torch reads the data as little-endian in any case."""
    without = index_of(legacy_file({"w": WHOLE}, SIX, system={"protocol_version": 1001}))
    assert [storage.swap_bytes for storage in without.storages] == [0]


def test_a_storage_of_an_unknown_class_hides_the_places_of_the_others() -> None:
    unknown = tensor_call(legacy_storage("8", 3, kind="Float5Storage"), shape=(3,))
    content = legacy_file({"w": WHOLE, "x": unknown}, {**SIX, "8": (3, bytes(3))})
    with pytest.raises(UnsupportedError, match=r"torch\.Float5Storage") as caught:
        index_of(content)
    assert "torch.load(weights_only=True)" in str(caught.value)


def test_files_of_big_endian_machines() -> None:
    """Such machines write numbers little-endian, but with the halves of complex numbers exchanged."""
    big, little = (legacy_file({"w": WHOLE}, SIX, system={"little_endian": flag}) for flag in (False, True))
    assert index_of(big).storages == index_of(little).storages
    numbers = tensor_call(legacy_storage("7", 3, kind="ComplexFloatStorage"), shape=(3,))
    content = legacy_file({"w": numbers}, {"7": (3, bytes(24))}, system={"little_endian": False})
    assert "complex tensor from a big-endian machine" in repr(index_of(content).tree)


@pytest.mark.parametrize("part", ["magic", "version", "system", "keys"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (Call(Global("os", "system"), ("true",)), UnsafeContentError, "names os.system"),
        ({"little_endian": True, "x": Global("os", "system")}, UnsafeContentError, "names os.system"),
        (legacy_storage("7", 6), UnsafeContentError, "names torch.FloatStorage outside its object"),
        (Raw(encode("7") + b"Q"), FormatError, "storage outside the object"),
        (Raw(b"F1.0\n"), UnsupportedError, "opcode FLOAT"),
    ],
)
def test_the_pickles_around_the_object_hold_plain_values(
    part: str, value: object, error: type[CheckpointError], words: str
) -> None:
    content = legacy_file({"w": WHOLE}, SIX, **{part: value})  # type: ignore[arg-type]  # a name chosen at run time
    with pytest.raises(error, match=words):
        TorchLegacyFormat().read_index(MemorySource(content), Limits())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["8"], "'8' is listed twice, or not used"),
        (["7", "7"], "'7' is listed twice"),
        (["7", "8"], "'8' is listed twice, or not used"),
        ([7], "not a list of strings"),
        (["7", None], "not a list of strings"),
        (("7",), "not a list of strings"),
        ("7", "not a list of strings"),
        ({"7": 1}, "not a list of strings"),
    ],
)
def test_lists_of_keys_that_disagree(keys: object, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        index_of(legacy_file({"w": WHOLE}, SIX, keys=keys))


# Persistent ids


IDENTITY: tuple[Any, ...] = ("storage", Global("torch", "FloatStorage"), "7", "cpu", 6, None)


@pytest.mark.parametrize(
    "identity",
    [
        IDENTITY[:5],
        (*IDENTITY, None),
        (),
        "7",
        7,
        ("tensor", *IDENTITY[1:]),
        ("module", "class", None, None),
        (*IDENTITY[:2], 7, *IDENTITY[3:]),
        (*IDENTITY[:4], -6, None),
    ],
)
def test_malformed_persistent_ids(identity: object) -> None:
    source = Raw(encode(identity) + b"Q")
    with pytest.raises(FormatError) as caught:
        index_of(legacy_file({"w": tensor_call(source, shape=(6,))}, SIX))
    assert caught.value.tensor == "w"


# Tensors of the first releases

FLOATS, PARAMETER = Global("torch", "FloatTensor"), Global("torch.nn.parameter", "Parameter")
STATE = (legacy_storage("7", 6), 0, (6,), (1,))
HOOKS = Call(Global("collections", "OrderedDict"), ([["hook", 1]],))


@pytest.mark.parametrize(
    "value",
    [
        Call(FLOATS),
        Call(PARAMETER),
        Call(PARAMETER, (WHOLE,)),
        Call(FLOATS, (3,), STATE),
        Call(FLOATS, (), STATE[:3]),
        Call(FLOATS, (), (*STATE, 1)),
        Call(FLOATS, (), {"size": 6}),
        Call(FLOATS, (), (None, 0, (6,), (1,))),
        Call(FLOATS, (), (STATE[0], 1, (6,), (1,))),
        Call(Global("torch", "DoubleTensor"), (), STATE),
        Call(PARAMETER, (WHOLE, True), (True, False, None)),
        Call(PARAMETER, (6,), (True, False, None)),
        Call(PARAMETER, (WHOLE,), (True, False)),
        Call(PARAMETER, (WHOLE,), (1, False, None)),
        Call(PARAMETER, (), (WHOLE, None, None, True)),
        Call(PARAMETER, (), (None, None, None, True, False)),
        Call(PARAMETER, (Call(FLOATS),), (True, False, None)),
        [Raw(encode(Call(FLOATS)) + b"q\0"), Raw(b"h\0" + encode(STATE) + b"b")],
    ],
    ids=str,
)
def test_malformed_tensors_of_the_first_releases(value: object) -> None:
    with pytest.raises((FormatError, UnsafeContentError)):
        index_of(legacy_file({"w": value, "storage": WHOLE}, SIX))


def test_hooks_of_a_parameter_of_the_first_releases() -> None:
    tree = index_of(legacy_file({"w": Call(PARAMETER, (WHOLE,), (True, False, HOOKS))}, SIX)).tree
    assert "backward hooks" in repr(tree)


def test_a_state_is_given_once() -> None:
    """Both tensors on the stack are the same object: the result of the first state is in the tree already."""
    twice = Raw(encode(Call(FLOATS)) + b"q\0" + b"h\0" + encode(STATE) + b"b" + b"\x86" + b"h\0\x86")
    with pytest.raises(FormatError, match="an object has no state"):
        index_of(legacy_file({"w": twice}, SIX))
    stacked = Raw(
        b"(" + encode(Call(FLOATS)) + b"q\0" + b"h\0" + encode(STATE) + b"b" + b"\x85" + encode(STATE) + b"b" + b"t"
    )
    with pytest.raises(FormatError):
        index_of(legacy_file({"w": stacked}, SIX))


# Files that are valid in two formats


def polyglot(mark: bytes) -> bytes:
    """Return a legacy file whose first 512 bytes are a tar header: text in its system information fills the fields."""

    def file(text: str) -> bytes:
        return legacy_file({"w": WHOLE}, SIX, system={"little_endian": True, "x": text})

    start = 100 - file(600 * "x").index(600 * b"x")
    fields = start * b"x" + b"0000644\0" + 2 * b"0000000\0" + 2 * b"00000000000\0"
    rest = b"0" + bytes(100) + mark.ljust(255, b"\0")
    spaces = file((fields + 8 * b" " + rest).decode())
    return file((fields + b"%06o\0 " % sum(spaces[:512]) + rest).decode())


@pytest.mark.parametrize("mark", [b"ustar\x0000", b""])
def test_a_file_that_is_also_a_tar_archive_is_refused(tmp_path: Path, mark: bytes) -> None:
    """torch reads the file as a tar archive, and the same bytes from memory as a legacy file."""
    content = polyglot(mark)
    assert tarfile.TarInfo.frombuf(content[:512], "utf-8", "surrogateescape").size == 0
    torch.load(io.BytesIO(content), weights_only=True)
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"legacy \.tar format"):
        torch.load(tmp_path / "f", weights_only=True)
    with pytest.raises(UnsupportedError, match="tar archive"):
        detect(MemorySource(content))


def test_a_name_in_the_place_of_a_tar_archives_mark_changes_nothing() -> None:
    start = legacy_file({"": WHOLE}).index(b"X\0\0\0\0") + 5
    content = legacy_file({(257 - start) * "x" + "ustar": WHOLE}, SIX)
    assert content[257:262] == b"ustar"
    index_of(content)


def test_zip_and_legacy_in_one_file() -> None:
    content = SAVED + torch_files.zipped({"archive/data.pkl": pickled({})})
    assert index_of(content).end == len(SAVED)
    source = MemorySource(torch_archive({}) + SAVED)
    assert detect(source).name == "torch-zip"
    with pytest.raises(CheckpointError):
        detect(source).read_index(source, Limits())


# Bounds


def test_lengths_that_the_file_does_not_hold() -> None:
    for opcodes in (b"X\xff\xff\xff\xff", b"\x8d" + 8 * b"\x7f", b"B\xff\xff\xff\xff", b"\x95" + 8 * b"\x7f"):
        content = legacy_file(b"\x80\x04" + opcodes + bytes(10_000))
        source = RecordingSource(MemorySource(content))
        with pytest.raises(TruncatedError):
            TorchLegacyFormat().read_index(source, Limits())
        assert source.read_bytes < 5 * len(content)


def test_a_long_file_is_not_read_up_to_a_length_beyond_the_limit(tmp_path: Path) -> None:
    start = legacy_file(b"\x80\x02B" + struct.pack("<I", 2**32 - 1), {}, keys=[])
    (tmp_path / "f").write_bytes(start)
    os.truncate(tmp_path / "f", 2**33)  # without using disk space
    source = RecordingSource(LocalFile(tmp_path / "f"))
    with pytest.raises(LimitError, match="more than 100000000 bytes"):
        detect(source).read_index(source, Limits())
    source.close()
    assert source.read_bytes < 1 << 20


def test_a_frame_that_is_longer_than_the_limit() -> None:
    content = legacy_file(b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + bytes(1_000_000))
    source = RecordingSource(MemorySource(content))
    with pytest.raises(LimitError, match="header_bytes"):
        TorchLegacyFormat().read_index(source, Limits(header_bytes=100_000))
    assert source.read_bytes < 500_000


# Comparison with torch


@pytest.mark.parametrize("count", [300, pytest.param(6_000, marks=pytest.mark.long)])
def test_changed_tensors_of_the_first_releases_are_refused_or_what_torch_reads(count: int) -> None:
    """``tests/contracts/hostile`` changes the files of later releases."""
    value = {"w": Call(FLOATS, (), STATE), "p": Call(PARAMETER, (), (WHOLE, None, None, True, False))}
    content, choose = legacy_file(value, SIX), random.Random(20)
    assert {"same", "refused", "inert"} <= {judge_torch(edit(content, choose, first=15)) for _ in range(count)}
