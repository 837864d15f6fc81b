"""Damaged and hostile torch.distributed.checkpoint directories: each refused with the right error."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

import sluice
from sluice import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    Limits,
    PathEscapeError,
    ReadError,
    TruncatedError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice.entries import tree as _tree
from sluice.formats.distributed.metadata import read_metadata
from support.directories import refusal
from support.distributed import StoredChunk, StoredTensor, chunks, everything, item, rows, save, torch_loaded, write
from support.hostile_archives import (
    Call,
    Global,
    Raw,
    chunk_metadata,
    distributed_metadata,
    encode,
    index_key,
    pickled,
    place,
    tensor_metadata,
    torch_archive,
    value_metadata,
)
from support.mutations import edits
from support.oracles import same
from support.sources import MemorySource
from support.system_calls import Injection, failing

WHOLE = chunk_metadata((0, 0), (2, 3))
FILE = "__0_0.distcp"
NBYTES = len(item(torch.ones(2, 3)))
METADATA = Global("torch.distributed.checkpoint.metadata", "Metadata")


def described(tmp_path: Path, items: object, stored: object, *values: object) -> Path:
    """Write a directory of one file with these values, or one tensor of 2 x 3, and this metadata."""
    (tmp_path / FILE).write_bytes(b"".join(map(item, values)) or item(torch.ones(2, 3)))
    (tmp_path / ".metadata").write_bytes(distributed_metadata(items, stored))
    return tmp_path


def one(tmp_path: Path, *, where: object = None, tensor: object = None) -> Path:
    """Write the same directory with a different location or tensor record."""
    items = {"w": tensor_metadata((2, 3), [WHOLE]) if tensor is None else tensor}
    return described(tmp_path, items, {index_key("w", (0, 0)): place(FILE, 0, NBYTES) if where is None else where})


@pytest.mark.parametrize("where", [None, place(FILE, 0, NBYTES, transforms=[])])
def test_the_builder_is_right(tmp_path: Path, where: Raw | None) -> None:
    with sluice.open(one(tmp_path, where=where)) as checkpoint:
        assert torch.equal(checkpoint["w"].read(), torch_loaded(tmp_path)["w"])


# The metadata's own pickle


@pytest.mark.parametrize(
    "value",
    [
        Global("os", "system"),
        Call(Global("os", "system"), ("touch broken",)),
        Raw(encode(Global("os", "system")) + b")\x81}b"),
        Call(Global("torch.distributed.checkpoint.metadata", "os.system"), ("true",)),
        Global("builtins", "eval"),
    ],
    ids=str,
)
def test_metadata_that_names_something_else(tmp_path: Path, value: object) -> None:
    for data in (pickled(value), distributed_metadata({"w": value}, {}), distributed_metadata({}, {}, paths=[value])):
        (tmp_path / ".metadata").write_bytes(data)
        error = refusal(tmp_path, UnsafeContentError, "the metadata names")
        assert error.file == str(tmp_path / ".metadata")
    assert not Path("broken").exists()


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (pickled({"w": 1}), FormatError, "the metadata is not a Metadata"),
        (pickled(Call(METADATA)), FormatError, "a Metadata"),
        (pickled(Call(METADATA, (1,))), FormatError, "arguments"),
        (pickled(Call(METADATA, (), 5)), FormatError, "not a Metadata"),
        (distributed_metadata({}, {}) + b"x", FormatError, "bytes follow"),
        (distributed_metadata({}, {})[:-1], TruncatedError, "ends before its STOP"),
        (b"{}", FormatError, "not a pickle"),
        (b"", TruncatedError, "empty"),
        (distributed_metadata([], {}), FormatError, "state_dict_metadata of the metadata is not a dictionary"),
        (distributed_metadata({}, None), FormatError, "storage_data of the metadata is not a dictionary"),
        (distributed_metadata({}, {}, paths=[1]), FormatError, "planner_data of the metadata is not a dictionary"),
        (distributed_metadata({1: value_metadata()}, {}), FormatError, "name of an item is not text"),
        (distributed_metadata({"w": value_metadata()}, {}), FormatError, "a value has no stored item"),
        (distributed_metadata({"w": 1}, {}), FormatError, "is not a TensorStorageMetadata"),
        (distributed_metadata({}, {"w": place("f", 0, 30)}), FormatError, "is not a MetadataIndex"),
        (distributed_metadata({}, {index_key(1): place("f", 0, 30)}), FormatError, "has no name"),
        (distributed_metadata({}, {index_key("w"): 1}), FormatError, "is not a _StorageInfo"),
        (distributed_metadata({}, {index_key("w", ("0",)): place("f", 0, 9)}), FormatError, "torch.Size holds a value"),
        (distributed_metadata({}, Raw(pickled(b"q")[2:-1] + b"Q")), FormatError, "refers to a storage"),
    ],
)
def test_metadata_that_is_none(tmp_path: Path, data: bytes, kind: type[CheckpointError], problem: str) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    assert type(refusal(tmp_path, kind, problem)) is kind


# Places


@pytest.mark.parametrize(
    "file", ["../x", "/etc/passwd", "a/../../x", "C:x", "C:\\x", "\\\\host\\x", "a\\b", "", ".", "a//b", "a\0b"]
)
def test_a_file_outside_the_directory(tmp_path: Path, file: str) -> None:
    error = refusal(one(tmp_path, where=place(file, 0, 30)), PathEscapeError)
    assert (error.tensor, error.found) == ("w", repr(file))


def test_a_failed_read_while_a_directory_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"w": rows(torch.arange(8.0), 4, files=2)}, {"n": 1})
    for at in (1, 2, 3):
        with monkeypatch.context() as patch:
            Injection(patch, failing(errno.EIO), at)
            refusal(tmp_path, ReadError)


def test_a_transformed_item_next_to_others(tmp_path: Path) -> None:
    halves = [chunk_metadata((0, 0), (2, 3)), chunk_metadata((2, 0), (2, 3))]
    items = {
        "w": tensor_metadata((2, 3), halves[:1]),
        "packed": tensor_metadata((4, 3), halves),
        "step": value_metadata(),
        "note": value_metadata(),
    }
    stored = {
        index_key("w", (0, 0)): place(FILE, 0, NBYTES),
        index_key("packed", (0, 0)): place(FILE, 0, NBYTES),
        index_key("packed", (2, 0)): place("other.distcp", 7, 30, transforms=["zstd"]),
        index_key("step"): place(FILE, NBYTES, len(item(3))),
        index_key("note"): place(FILE, 0, 3, transforms="zstd"),
    }
    with sluice.open(described(tmp_path, items, stored, torch.ones(2, 3), 3)) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint["w"].read().eq(1).all()
        assert checkpoint.tree["step"] == 3
        assert isinstance(checkpoint.tree["note"], sluice.UnsupportedValue)
        with pytest.raises(UnsupportedError, match="transformed when it was written") as caught:
            checkpoint["packed"]
    assert (caught.value.tensor, caught.value.found) == ("packed", "['zstd']")


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (place(FILE, -1, 30), "malformed"),
        (place(FILE, 0, -30), "malformed"),
        (place(FILE, 0.5, 30), "malformed"),
        (place(FILE, True, 30), "malformed"),
        (place(None, 0, 30), "malformed"),
        (place(FILE, 1, NBYTES), "extends past the end"),
        (place(FILE, 2**62, 2**62), "extends past the end"),
        (place(FILE, 0, 10**40), "extends past the end"),
        (place(FILE, 10**40, 30), "extends past the end"),
        (place(FILE, 0, 21), "too short"),
        (place(FILE, 0, 0), "too short"),
        (place(FILE, 4, 400), "not a torch.save file"),
    ],
)
def test_places_that_do_not_exist(tmp_path: Path, where: Raw, problem: str) -> None:
    refusal(one(tmp_path, where=where), FormatError, problem)


def test_a_file_that_is_cut_short_or_missing(tmp_path: Path) -> None:
    write(tmp_path / "d", {"a": rows(torch.ones(4, 3), 4, files=2), "b": rows(torch.ones(4, 3), 2)})
    file = tmp_path / "d" / "__1_0.distcp"
    data = file.read_bytes()
    for cut in range(1, len(data), 101):
        os.truncate(file, len(data) - cut)
        error = refusal(tmp_path / "d", FormatError)
        assert error.tensor in {"a[1, 0]", "a[3, 0]"}
        assert error.file == str(file)
    file.write_bytes(b"")
    refusal(tmp_path / "d", TruncatedError)
    file.unlink()
    refusal(tmp_path / "d", IncompleteCheckpointError, "missing files (1):\n    '__1_0.distcp'")


@pytest.mark.parametrize("name", [".metadata", FILE])
def test_a_pointer_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    one(tmp_path)
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    error = refusal(tmp_path, IncompleteCheckpointError)
    assert error.file == str(tmp_path / name)
    assert "git lfs pull" in str(error)


def test_all_missing_files_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "d", {"a": rows(torch.ones(40, 3), 40, files=40)})
    for file in (tmp_path / "d").glob("*.distcp"):
        file.unlink()
    assert "missing files (40):" in refusal(tmp_path / "d").problem
    assert "and 20 more" in refusal(tmp_path / "d").problem


@pytest.mark.parametrize(
    ("stored", "found", "expected"),
    [
        (torch.ones(2, 3, dtype=torch.int32), "int32 [2, 3]", "float32 [2, 3]"),
        (torch.ones(3, 2), "float32 [3, 2]", "float32 [2, 3]"),
        ([1, 2], "list", None),
    ],
    ids=["dtype", "shape", "value"],
)
def test_another_item_in_the_place_of_a_tensor(
    tmp_path: Path, stored: object, found: str, expected: str | None
) -> None:
    items = {"w": tensor_metadata((2, 3), [WHOLE])}
    described(tmp_path, items, {index_key("w", (0, 0)): place(FILE, 0, len(item(stored)))}, stored)
    error = refusal(tmp_path, FormatError)
    assert (error.tensor, error.found, error.expected) == ("w", found, expected)


def test_items_that_overlap(tmp_path: Path) -> None:
    stored = {index_key(name, (0, 0)): place(FILE, 0, NBYTES) for name in "vw"}
    items = {name: tensor_metadata((2, 3), [WHOLE]) for name in "vw"}
    refusal(described(tmp_path, items, stored), FormatError, "overlaps the previous item")


def test_an_item_that_is_stored_twice(tmp_path: Path) -> None:
    stored = Raw(b"}(" + 2 * (encode(index_key("w", (0, 0))) + encode(place(FILE, 0, 30))) + b"u")
    refusal(described(tmp_path, {"w": tensor_metadata((2, 3), [WHOLE])}, stored), FormatError, "stored twice")


# Tensors and chunks


def boxes(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Raw]:
    return [chunk_metadata(start, shape) for start, shape in pairs]


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (tensor_metadata((2, 3), boxes(((0, 0), (2, 3)), ((0, 0), (2, 3)))), "overlap"),
        (tensor_metadata((2, 3), boxes(((0, 0), (1, 3)), ((0, 0), (1, 3)))), "overlap"),
        (tensor_metadata((2, 3), boxes(((0, 1), (2, 2)))), "leave a gap"),
        (tensor_metadata((2, 3), boxes(((0, 0), (0, 3)))), "leave a gap"),
        (tensor_metadata((2, 3), boxes(((1, 0), (2, 3)))), "extends outside its tensor"),
        (tensor_metadata((2, 3), boxes(((0,), (2,)))), "extends outside its tensor"),
        (tensor_metadata((2, 3), []), "no list of chunks"),
        (tensor_metadata((2, 3), None), "no list of chunks"),
        (tensor_metadata((2, 3), [5]), "is not a ChunkStorageMetadata"),
        (tensor_metadata((2, -3), [WHOLE]), "not a valid size"),
        (tensor_metadata((2, True), [WHOLE]), "not an integer"),
        (tensor_metadata((2**62, 2**62), [WHOLE]), "more bytes than torch can count"),
        (tensor_metadata((0, 2**62, 2**62), [WHOLE]), "more bytes than torch can count"),
        (tensor_metadata((1,) * 65, [WHOLE]), "more than 64 dimensions"),
        (tensor_metadata((2, 3), [chunk_metadata((0, 0), (2, 2**63))]), "not a valid size"),
        (tensor_metadata((2, 3), [WHOLE], dtype=5), "is not a torch.dtype"),
        (tensor_metadata((2, 3), boxes(((0, 0), (1, 3)), ((1, 0), (1, 3)))), "has no stored item"),
    ],
)
def test_chunks_that_do_not_make_a_tensor(tmp_path: Path, tensor: Raw, problem: str) -> None:
    error = refusal(one(tmp_path, tensor=tensor), FormatError, problem)
    assert error.file == str(tmp_path / ".metadata")


def test_a_gap_between_chunks_is_named(tmp_path: Path) -> None:
    error = refusal(one(tmp_path, tensor=tensor_metadata((2, 3), boxes(((0, 0), (1, 3))))), FormatError, "leave a gap")
    assert (error.file, error.tensor, error.found) == (str(tmp_path / ".metadata"), "w", "element [1, 0] in 0")


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (tensor_metadata((2, 3), [WHOLE], dtype="qint8"), "torch.qint8"),
        (tensor_metadata((2, 3), [WHOLE], layout="torch.sparse_coo"), "torch.sparse_coo"),
    ],
)
def test_a_tensor_of_a_kind_that_is_not_read(tmp_path: Path, tensor: Raw, found: str) -> None:
    stored = {index_key("w", (0, 0)): place(FILE, 0, 10), index_key("v", (0, 0)): place(FILE, 0, NBYTES)}
    described(tmp_path, {"w": tensor, "v": tensor_metadata((2, 3), [WHOLE])}, stored)
    with sluice.open(tmp_path) as checkpoint:
        assert not checkpoint.index.notes
        assert torch.equal(checkpoint["v"].read(), torch.ones(2, 3))
        with pytest.raises(UnsupportedError) as caught:
            checkpoint["w"]
    assert (caught.value.tensor, caught.value.found) == ("w", found)
    assert caught.value.file == str(tmp_path / ".metadata")


def test_a_chunk_of_a_kind_that_is_not_assembled(tmp_path: Path) -> None:
    halves = [item(torch.ones(2)), item(torch.ones(2).to_sparse())]
    stored = [StoredChunk(start=(2 * number,), shape=(2,), item=half) for number, half in enumerate(halves)]
    write(tmp_path / "d", {"w": StoredTensor(shape=(4,), chunks=stored), "v": rows(torch.ones(2), 1)})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert list(checkpoint) == ["v"]
        with pytest.raises(UnsupportedError, match="chunks are not dense") as caught:
            checkpoint["w"]
    assert (caught.value.file, caught.value.found) == (str(tmp_path / "d" / FILE), "sparse_coo")


# Items


@pytest.mark.parametrize(
    "value",
    [
        Global("os", "system"),
        Call(Global("os", "system"), ("true",)),
        {"deep": [Call(Global("os", "system"), ("true",))]},
    ],
    ids=str,
)
def test_a_value_that_names_code(tmp_path: Path, value: object) -> None:
    write(tmp_path / "d", {"w": rows(torch.ones(2), 1)}, {"extra": torch_archive(value)})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert torch.equal(checkpoint["w"].read(), torch.ones(2))
        name, leaf = next(iter(_tree.opaques(checkpoint.tree).items()))
        assert repr(leaf) == "<not loaded: os.system>"
        assert any("os.system" in note for note in checkpoint.index.notes)
        with pytest.raises(UnsafeContentError, match=r"os\.system") as caught:
            checkpoint[name]
        assert caught.value.tensor == name
        with pytest.raises(UnsafeContentError, match=r"os\.system"):
            sluice.open(checkpoint, key=name)
        with pytest.raises(UnsafeContentError, match=r"os\.system"):
            sluice.load_state_dict(checkpoint)


def test_a_chunk_that_names_code(tmp_path: Path) -> None:
    data = torch_archive(Call(Global("os", "system"), ("true",)))
    stored = StoredTensor(shape=(2,), chunks=[StoredChunk(start=(0,), shape=(2,), item=data)])
    error = refusal(write(tmp_path / "d", {"w": stored}), UnsafeContentError)
    assert error.tensor == "w"


def test_offsets_in_errors_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    first, second = item([1]), torch_archive(Raw(b"\x82\x01"))
    write(tmp_path / "d", {}, {"a": first, "b": second})
    error = refusal(tmp_path / "d", UnsafeContentError)
    assert error.offset is not None
    assert len(first) < error.offset < len(first) + len(second)
    assert (tmp_path / "d" / FILE).read_bytes()[error.offset :][:1] == b"\x82"  # EXT1


def test_a_chunk_that_contradicts_its_first_bytes(tmp_path: Path) -> None:
    """The chunk starts like the one before it, but its archive's directory leads to the transposed tensor."""
    honest = item(torch.ones(4, 4))
    other = item(torch.ones(4, 4).t())
    start = honest.find(b"PK\7\x08")
    lying = honest[:start] + other[start:]
    halves = [StoredChunk(start=(first, 0), shape=(4, 4), item=each) for first, each in ((0, honest), (4, lying))]
    write(tmp_path / "d", {"w": StoredTensor(shape=(8, 4), chunks=halves)})
    with sluice.open(tmp_path / "d") as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint["w"].read()
    assert caught.value.tensor == "w[4, 0]"


def test_damage_after_the_first_bytes_is_found_before_data_is_read(tmp_path: Path) -> None:
    write(tmp_path / "d", {"w": rows(torch.ones(512, 4), 2)})
    file = tmp_path / "d" / FILE
    data = bytearray(file.read_bytes())
    end = len(data) - 22
    data[end : end + 4] = b"XXXX"  # the end record of the second item
    file.write_bytes(data)
    with sluice.open(tmp_path / "d") as checkpoint:
        assert torch.equal(checkpoint["w"][0].read(), torch.ones(4))
        with pytest.raises(TruncatedError) as caught:
            checkpoint["w"].read()
    assert caught.value.tensor == "w[256, 0]"


def test_items_written_as_safetensors(tmp_path: Path) -> None:
    formats = getattr(filesystem, "SerializationFormat", None)
    if formats is None:
        pytest.skip("this torch writes no items as safetensors")
    save(tmp_path / "d", {"w": torch.ones(3)}, serialization_format=formats.SAFETENSORS)
    refusal(tmp_path / "d", UnsupportedError, "safetensors")


# Existing and missing files


@pytest.mark.parametrize("left", [".metadata.tmp", "__0.metadata.tmp", "__0_0.distcp"])
def test_a_checkpoint_that_was_never_finished(tmp_path: Path, left: str) -> None:
    write(tmp_path, {"w": rows(torch.ones(2), 1)})
    os.rename(tmp_path / ".metadata", tmp_path / left)
    torch.save(torch.ones(3), tmp_path / "meta.pt")
    error = refusal(tmp_path, IncompleteCheckpointError)
    assert (error.expected, left in str(error.found)) == (".metadata", True)


# Paths of items


@pytest.mark.parametrize(
    ("paths", "kind", "problem"),
    [
        ({"a": ("x",)}, FormatError, "does not match its name"),
        ({"b.c": ("b", "c")}, FormatError, "conflict"),
        ({"l.0": ("l", 0), "l.x": ("l", "x")}, FormatError, "conflict"),
        ({"x.y": ("x", "y"), "x": ("x",)}, FormatError, "conflict"),
        ({"a": ()}, FormatError, "not a tuple"),
        ({"a": "x"}, FormatError, "not a tuple"),
        ({"a": ("x", -1)}, FormatError, "neither text nor a list position"),
        ({"a": ("x", True)}, FormatError, "neither text nor a list position"),
        ({"a": ("x", None)}, FormatError, "neither text nor a list position"),
        ({"a": (0, "x")}, FormatError, "starts with a list position"),
        ({"l.1000000000": ("l", 10**9)}, LimitError, "'entries'"),
        ({"a": ("x",) * 65}, LimitError, "'depth'"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path: Path, paths: Any, kind: type[CheckpointError], problem: str) -> None:
    refusal(write(tmp_path / "d", {}, {name: {} for name in ("b", *paths)}, paths=paths), kind, problem)


# Limits


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (Limits(entries=3), "'entries'"),
        (Limits(files=1), "'files'"),
        (Limits(header_bytes=1000), "'header_bytes'"),
        (Limits(name_bytes=20), "name of a global"),
        (Limits(nodes=100), "opcodes"),
    ],
    ids=str,
)
def test_limits(tmp_path: Path, limits: Limits, problem: str) -> None:
    write(tmp_path / "d", {"w": rows(torch.ones(8, 2), 8, files=2)})
    sluice.open(tmp_path / "d").close()
    refusal(tmp_path / "d", LimitError, problem, limits=limits)


def test_chunks_that_are_cut_in_many_dimensions() -> None:
    boxes = [chunk_metadata(start, (1,) * 5) for start in itertools.product((0, 1), repeat=5)]
    stored = {index_key("w", start): place(FILE, 0, 30) for start in itertools.product((0, 1), repeat=5)}
    data = distributed_metadata({"w": tensor_metadata((2,) * 5, boxes)}, stored)
    assert read_metadata(MemorySource(data), Limits()).items.keys() == {"w"}
    with pytest.raises(LimitError, match="too many corners of chunks for the limit 'entries'"):
        read_metadata(MemorySource(data), Limits(entries=200))


def test_values_together_pass_a_limit(tmp_path: Path) -> None:
    write(tmp_path / "d", {}, {f"v{number}": "x" * 5000 for number in range(4)})
    sluice.open(tmp_path / "d", limits=Limits(header_bytes=24_000)).close()
    refusal(tmp_path / "d", LimitError, limits=Limits(header_bytes=12_000))


# Every byte


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensor = torch.arange(6.0).view(2, 3)
    halves = chunks(tensor, [((0, 0), (1, 3)), ((1, 0), (1, 3))])
    return write(tmp_path / "d", {"m.w": halves}, {"n": 3}, paths={"m.w": ("m", "w"), "n": ("n",)})


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("name", "step"), [(".metadata", 4), (FILE, 97), pytest.param(FILE, 4, marks=pytest.mark.long)]
)
def test_a_changed_byte_or_the_end_at_any_byte(small: Path, name: str, step: int, part: int) -> None:
    content, honest = (small / name).read_bytes(), torch_loaded(small)
    seen: set[type[CheckpointError]] = set()
    for data in islice(chain(edits(content), (content[:end] for end in range(len(content)))), part, None, step):
        (small / name).write_bytes(data)
        try:
            with sluice.open(small) as checkpoint:
                ours = everything(checkpoint)
        except CheckpointError as error:
            assert str(error)
            seen.add(type(error))
            continue
        try:
            theirs = torch_loaded(small)
        except CheckpointException:  # torch checks more of records that are not read
            theirs = honest
        assert same(ours, theirs)
    assert FormatError in seen
    assert step == 97 or TruncatedError in seen  # few changes of a data file end in it
    assert name == FILE or UnsafeContentError in seen


def test_pickles_of_every_protocol(small: Path) -> None:
    theirs = torch_loaded(small)
    root = pickle.loads((small / ".metadata").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (small / ".metadata").write_bytes(pickle.dumps(root, protocol))
        with sluice.open(small) as checkpoint:
            assert torch.equal(checkpoint["m.w"].read(), theirs["m"]["w"])
