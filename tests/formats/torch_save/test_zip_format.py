"""Torch zip files: the index equals what ``torch.load`` returns, bit for bit; damaged ones raise a typed error."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sluice
from sluice._dtypes import torch_dtype
from sluice._errors import FormatError, LimitError, SluiceError, TruncatedError, UnsafeContentError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Opaque, UnsupportedValue
from support.dtypes import TORCH_DTYPES
from support.hostile_archives import Call, Global, pickled, storage, tensor_call, torch_archive
from support.sources import MemorySource
from support.torch_files import PROTOCOLS, check, filled, index_of, records_of, saved, tree_of, zipped
from support.watching import watch


def test_one_empty_storage_of_two_dtypes() -> None:
    empty = torch.empty(0)
    content = saved([empty, empty.view(torch.int32), empty.view(0, 3)])
    check(content, torch.load(io.BytesIO(content)))


def test_a_file_of_the_c_plus_plus_writer() -> None:
    content = torch._C._pickle_save((torch.arange(6.0).view(2, 3), torch.ones(2)))
    check(content, torch.load(io.BytesIO(content)))


@st.composite
def views(draw: st.DrawFn) -> tuple[str, int, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """Draw a dtype, a number of elements, and views of them: shapes, strides and offsets."""
    count = draw(st.integers(0, 40))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, count))
        shape, stride, last = [], [], offset
        for _ in range(draw(st.integers(0, 4))):
            step = draw(st.integers(0, 5))
            most = (count - 1 - last) // step + 1 if step and last < count else 4
            shape.append(draw(st.integers(0, max(0, min(most, 5)))))
            stride.append(step)
            last += max(0, shape[-1] - 1) * step
        if last < count or 0 in shape:
            found.append((tuple(shape), tuple(stride), offset))
    return draw(st.sampled_from(TORCH_DTYPES)), count, found


@pytest.mark.parametrize("legacy", [False, True])
@given(drawn=views(), protocol=st.integers(2, 5))
def test_any_views(
    drawn: tuple[str, int, list[tuple[tuple[int, ...], tuple[int, ...], int]]], protocol: int, legacy: bool
) -> None:
    name, count, chosen = drawn
    base = filled(torch.float32 if legacy else torch_dtype(name), count)  # torch does not read all in legacy files
    content = saved([torch.as_strided(base, *view) for view in chosen], protocol, legacy=legacy)
    with warnings.catch_warnings(action="ignore"):  # torch calls complex32 experimental
        # torch's own safe unpickler reads protocol 2 only
        check(content, torch.load(io.BytesIO(content), weights_only=protocol == 2))


# The index


def test_only_storages_that_the_pickle_names_are_in_the_index() -> None:
    content = torch_archive({"w": tensor_call(storage("b", 1), shape=(1,))}, {"a": bytes(8), "b": bytes(4), "c": b""})
    assert [(found.key, found.nbytes, found.located) for found in index_of(content).storages] == [("b", 4, False)]


def test_what_is_not_built_is_noted() -> None:
    value = {name: Call(Global("module", name)) for name in "abcdefghijk"}
    index = index_of(torch_archive(value))
    assert isinstance(index.tree, dict)
    assert all(isinstance(leaf, Opaque) for leaf in index.tree.values())
    (note,) = index.notes
    assert note.startswith("The file names module.a, module.b, ")
    assert note.endswith("module.h and 3 more: sluice neither imports nor builds them.")


def test_pickles_that_many_files_share_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = TorchZipFormat(max_cached=2)
    values = (torch.ones(3), torch.zeros(3), 0.5, 0.5, [1], [1], 7, 7)
    expected = [index_of(saved(value)) for value in values]
    run: list[Unpickler] = []
    watch(monkeypatch, Unpickler, "load", run.append)
    runs = []
    for value, index in zip(values, expected, strict=True):
        assert caching.read_index(MemorySource(saved(value)), Limits()) == index
        runs.append(len(run))
    assert runs == [1, 1, 2, 2, 3, 4, 5, 6]  # lists are mutable, and the cache of two is full
    short = torch_archive(tensor_call(storage("0", 4), shape=(4,)), {"0": bytes(16)})
    caching = TorchZipFormat(max_cached=2)
    caching.read_index(MemorySource(short), Limits())
    wrong = torch_archive(tensor_call(storage("0", 4), shape=(4,)), {"0": bytes(12)})
    with pytest.raises(FormatError, match="does not match the pickle"):
        caching.read_index(MemorySource(wrong), Limits())


def test_the_last_storage_is_checked_while_indexing() -> None:
    content = bytearray(saved([torch.ones(2), torch.zeros(3)]))
    content[content.find(b"archive/data/1") - 2] += 64  # its padding, so that it reaches into the next record
    with pytest.raises(FormatError, match="overlaps the next record"):
        index_of(bytes(content))


@pytest.mark.parametrize("order", ["LITTLE", "BIG", "NATIVE", None])
def test_files_without_a_byte_order_have_the_default_of_torch(tmp_path: Path, order: str | None) -> None:
    records = records_of(saved({"w": torch.arange(5.0), "b": torch.tensor([True])}))
    del records["archive/byteorder"]
    (tmp_path / "f.pt").write_bytes(zipped(records))
    before = torch.serialization.get_default_load_endianness()
    torch.serialization.set_default_load_endianness(getattr(torch.serialization.LoadEndianness, order or "", None))  # type: ignore[no-untyped-call]
    try:
        ours, theirs = sluice.load_state_dict(tmp_path / "f.pt"), torch.load(tmp_path / "f.pt", weights_only=True)
    finally:
        torch.serialization.set_default_load_endianness(before)  # type: ignore[no-untyped-call]
    assert torch.equal(ours["w"], theirs["w"])
    assert torch.equal(ours["b"], theirs["b"])
    assert torch.equal(theirs["w"], torch.arange(5.0)) == (order != "BIG")


# Damaged and hostile files


W = {"w": tensor_call(storage("0", 4), shape=(4,))}

DATA = {"0": bytes(16)}


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (torch_archive(W, {"0": b""}), FormatError, "does not match the pickle"),
        (torch_archive(pickled(W) + b"."), FormatError, "bytes follow the pickle"),
        (torch_archive(b""), TruncatedError, "before its STOP"),
        (torch_archive(W, DATA, records={"byteorder": b""}), UnsupportedError, "byte order"),
        (torch_archive(W, DATA, records={"byteorder": bytes(65)}), LimitError, "more than 64 bytes"),
        (torch_archive(W, DATA, records={"byteorder": b"BIG"}), UnsupportedError, "byte order"),
        (torch_archive(W, DATA, records={"version": None}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": b"0"}), UnsupportedError, "version"),
        (torch_archive(W, DATA, records={"version": b"-1"}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": "³".encode("latin1")}), FormatError, "version"),
        (torch_archive(W, DATA, records={".data/version": b"99"}), UnsupportedError, "version"),
        (torch_archive(W, DATA, records={".storage_alignment": b"6\0"}), FormatError, "alignment of storages"),
        (torch_archive(pickled(W).replace(b"tQ", b"tQQ"), DATA), FormatError, "does not identify a storage"),
        (torch_archive({"w": tensor_call(storage("../x", 4), shape=(4,))}, DATA), FormatError, "no record for storage"),
        (torch_archive({"w": tensor_call(storage("", 4), shape=(4,))}, DATA), FormatError, "no record for storage"),
        (
            torch_archive([tensor_call(storage(key, 1), shape=(1,)) for key in "aA"], {"a": bytes(4)}),
            FormatError,
            "no record for storage 'A'",
        ),
        (torch_archive(Call(Global("my.module", "Model"))), UnsafeContentError, "pickled my.module.Model object"),
        (torch_archive(Global("os", "system")), UnsafeContentError, "pickled os.system object"),
        (torch_archive(Call(Global("os", "system"), ("exit 1",))), UnsafeContentError, "pickled os.system object"),
        (torch_archive(storage("0", 16, kind="QInt8Storage"), DATA), UnsupportedError, "not viewed by a tensor"),
    ],
)
def test_bad_files(content: bytes, kind: type[SluiceError], problem: str) -> None:
    with pytest.raises(kind, match=problem) as caught:
        index_of(content)
    assert caught.value.file == "memory"


def test_the_version_may_be_in_another_record() -> None:
    assert index_of(torch_archive(W, DATA, records={"version": None, ".data/version": b"3\n"}))


def test_a_subclass_that_wraps_tensors_is_named() -> None:
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    kind = Global("torch.distributed.tensor", "DTensor")
    inner = (kind, Global("torch", "float32"), (2,), (1,), 0, "torch.strided", "cpu", False)
    whole = Call(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, kind, inner, {}))
    for value in (Call(rebuild, inner), whole):
        leaf = index_of(torch_archive({"w": value})).tree["w"]  # type: ignore[index]
        assert isinstance(leaf, UnsupportedValue)
        assert "subclass" in leaf.reason
        assert leaf.qualified_name == "torch.distributed.tensor.DTensor"


@PROTOCOLS
def test_a_whole_module(protocol: int) -> None:
    content = saved(torch.nn.Linear(2, 2), protocol)
    with pytest.raises(UnsafeContentError, match=r"pickled torch.nn.modules.linear.Linear object"):
        index_of(content)
    leaf = tree_of(saved({"model": torch.nn.Linear(2, 2), "step": 1}, protocol))
    assert leaf == {"model": Opaque(qualified_name="torch.nn.modules.linear.Linear"), "step": 1}
