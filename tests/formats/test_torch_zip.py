"""Torch zip files: the index is what ``torch.load`` gives, down to the bytes; everything else is a typed error."""

from __future__ import annotations

import collections
import io
import pickle
import random
import statistics
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memory_source import MemorySource
from sluice._dtypes import ITEM_BYTES, dtype_name, torch_dtype
from sluice._errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    LimitError,
    SluiceError,
    TruncatedError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice._options import Limits
from sluice._records import Entry, Index, Opaque
from sluice.formats._pickle import Unpickler
from sluice.formats._torch_zip import TorchZip
from sluice.sources import Source
from sluice.testing import RecordingSource
from sluice.testing._archives import (
    ArchiveRecord,
    Call,
    Global,
    Raw,
    build_archive,
    encode,
    pickled,
    storage,
    tensor_call,
    torch_archive,
)

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def saved(value: object, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def index_of(content: bytes, limits: Limits | None = None) -> Index:
    return TorchZip().read_index(MemorySource(content), limits or Limits())


def tree_of(content: bytes, limits: Limits | None = None) -> Any:
    return index_of(content, limits).tree


class Comparison:
    """Compares an index with what torch loads."""

    def __init__(self, source: Source, index: Index) -> None:
        self._source = source
        self._index = index
        self._offsets = TorchZip().locate(source, index, range(len(index.storages)))
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
            assert type(found) is (tuple if isinstance(expected, torch.Size) else type(expected))
            assert isinstance(found, (list, tuple))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                self.check(one, other)
        elif isinstance(expected, (torch.dtype, torch.device, torch.layout)):
            assert found == str(expected)
        else:
            assert type(found) is type(expected)
            assert found == expected

    def _check_tensor(self, entry: Entry, tensor: torch.Tensor) -> None:
        assert (entry.dtype, entry.shape) == (dtype_name(tensor.dtype), tuple(tensor.shape))
        assert (entry.stride, entry.storage_offset) == (tensor.stride(), tensor.storage_offset())
        assert entry.parameter == isinstance(tensor, torch.nn.Parameter)
        assert entry.requires_grad == tensor.requires_grad
        assert self._objects.setdefault(id(entry), tensor) is tensor  # one object where torch has one
        record = self._index.storages[entry.storage]
        memory = tensor.untyped_storage()
        assert record.nbytes == memory.nbytes()
        if record.nbytes:
            assert self._pointers.setdefault(entry.storage, memory.data_ptr()) == memory.data_ptr()
            assert len(set(self._pointers.values())) == len(self._pointers)
        stored = self._source.read_at(self._offsets[entry.storage], record.nbytes)
        assert stored == bytes(torch.empty(0, dtype=torch.uint8).set_(memory).tolist())


def check(value: object, protocol: int = 2) -> Index:
    """Save a value, compare its index with what torch loads, and return the index."""
    content = saved(value, protocol)
    # torch's own safe unpickler reads protocol 2 only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        expected = torch.load(io.BytesIO(content), weights_only=protocol == 2)
    source = MemorySource(content)
    index = TorchZip().read_index(source, Limits())
    Comparison(source, index).check(index.tree, expected)
    return index


# What torch.save writes


def filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return ``count`` elements of any bits; booleans only 0 and 1."""
    raw = torch.arange(count * ITEM_BYTES[dtype_name(dtype)], dtype=torch.int64).to(torch.uint8) * 37 + 11
    return (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


@PROTOCOLS
@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_dtype(name: str, protocol: int) -> None:
    dtype = torch_dtype(name)
    index = check(
        {"w": filled(dtype, 6).view(2, 3), "scalar": filled(dtype, 1)[0], "empty": filled(dtype, 0)}, protocol
    )
    assert isinstance(index.tree, dict)
    assert {entry.dtype for entry in index.tree.values()} == {name}


@PROTOCOLS
def test_views_and_ties(protocol: int) -> None:
    base = torch.arange(60.0)
    index = check(
        {
            "base": base,
            "again": base,
            "row": base[10:20],
            "column": base.view(6, 10)[:, 3],
            "transposed": base.view(6, 10).t(),
            "strided": base[1::7],
            "expanded": base[5].expand(4, 3),
            "overlapping": base.as_strided((4, 8), (2, 1), 3),
            "scalar": base[59],
            "nothing": base[60:],
            "apart": base.clone(),
        },
        protocol,
    )
    assert len(index.storages) == 2
    assert isinstance(index.tree, dict)
    assert index.tree["base"] is index.tree["again"]


@PROTOCOLS
def test_parameters(protocol: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    check({"parameter": parameter, "tied": parameter, "frozen": frozen, "leaf": leaf}, protocol)


def test_attributes_of_tensors_are_dropped_with_a_note() -> None:
    parameter, tensor = torch.nn.Parameter(torch.ones(3)), torch.ones(2)
    parameter.note, tensor.note = "a", "b"  # type: ignore[attr-defined]
    index = check({"parameter": parameter, "tensor": tensor, "buffer": torch.nn.Buffer(torch.ones(1))})
    assert index.notes == ("The Python attributes of 3 tensors are not kept.",)


@PROTOCOLS
def test_modules_and_optimizers(protocol: int) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": {"lr": 0.1, "x": None},
    }
    index = check(state, protocol)
    assert isinstance(index.tree, dict)
    assert index.tree["model"]._metadata["1"] == {"version": 2}


@PROTOCOLS
def test_plain_values(protocol: int) -> None:
    check([torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.device("cuda", 3), torch.strided], protocol)
    check(
        {
            1: "a",
            "s": {1, 2},
            "c": 1 + 2j,
            "b": bytearray(b"xy"),
            "n": 2**70,
            "k": collections.Counter("ab"),
        },
        protocol,
    )
    check((), protocol)
    check(torch.arange(3), protocol)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_containers_beyond_torchs_own_list(protocol: int) -> None:
    check({"d": collections.defaultdict(list, a=[1]), "f": frozenset("ab"), "b": b"bytes", "e": b""}, protocol)


def test_one_empty_storage_of_two_dtypes() -> None:
    empty = torch.empty(0)
    check([empty, empty.view(torch.int32), empty.view(0, 3)])


def test_a_file_of_the_c_plus_plus_writer() -> None:
    content = torch._C._pickle_save((torch.arange(6.0).view(2, 3), torch.ones(2)))
    source = MemorySource(content)
    index = TorchZip().read_index(source, Limits())
    Comparison(source, index).check(index.tree, torch.load(io.BytesIO(content)))


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
    return draw(st.sampled_from(list(ITEM_BYTES))), count, found


@given(drawn=views(), protocol=st.integers(2, 5))
def test_any_views(drawn: tuple[str, int, list[tuple[tuple[int, ...], tuple[int, ...], int]]], protocol: int) -> None:
    name, count, chosen = drawn
    base = filled(torch_dtype(name), count)
    check([torch.as_strided(base, *view) for view in chosen], protocol)


# The index


def test_metadata_and_files() -> None:
    content = saved({"w": torch.ones(2)})
    index = index_of(content)
    assert index.format == TorchZip().name == "torch-zip"
    assert index.metadata == {"version": "3", "byteorder": "little", "archive": "archive"}
    assert [file.identity.nbytes for file in index.files] == [len(content)]
    assert TorchZip().matches(content[:4096])
    assert not TorchZip().matches(b"\x80\x02" + content)


def test_only_storages_that_the_pickle_names_are_in_the_index() -> None:
    content = torch_archive({"w": tensor_call(storage("b", 1), shape=(1,))}, {"a": bytes(8), "b": bytes(4), "c": b""})
    assert [(found.key, found.nbytes, found.located) for found in index_of(content).storages] == [("b", 4, False)]


def test_what_is_not_built_is_noted() -> None:
    value = {name: Call(Global("module", name)) for name in "abcdefg"}
    index = index_of(torch_archive(value))
    assert isinstance(index.tree, dict)
    assert all(isinstance(leaf, Opaque) for leaf in index.tree.values())
    assert index.notes == (
        "The file names module.a, module.b, module.c, module.d, module.e, ...: sluice neither imports nor builds them.",
    )


def test_indexing_reads_no_tensor_data() -> None:
    content = saved({str(number): torch.ones(300_000) for number in range(4)})
    source = RecordingSource(MemorySource(content))
    index = TorchZip().read_index(source, Limits())
    assert source.read_bytes < 10_000
    source.reads.clear()
    assert TorchZip().locate(source, index, []) == {}
    assert source.reads == []
    offsets = TorchZip().locate(source, index, [2, 0])
    assert list(offsets) == [2, 0]
    assert source.read_bytes < 200
    assert all(offset % 64 == 0 for offset in offsets.values())


def test_pickles_that_many_files_share_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[object] = []
    load = Unpickler.load

    def counted(unpickler: Unpickler) -> object:
        run.append(unpickler)
        return load(unpickler)

    remembering = TorchZip(remembered=2)
    values = (torch.ones(3), torch.zeros(3), 0.5, 0.5, [1], [1], 7, 7)
    expected = [index_of(saved(value)) for value in values]
    monkeypatch.setattr(Unpickler, "load", counted)
    runs = []
    for value, index in zip(values, expected, strict=True):
        assert remembering.read_index(MemorySource(saved(value)), Limits()) == index
        runs.append(len(run))
    assert runs == [1, 1, 2, 2, 3, 4, 5, 6]  # lists can change, and the memory of two is full
    short = torch_archive(tensor_call(storage("0", 4), shape=(4,)), {"0": bytes(16)})
    remembering = TorchZip(remembered=2)
    remembering.read_index(MemorySource(short), Limits())
    wrong = torch_archive(tensor_call(storage("0", 4), shape=(4,)), {"0": bytes(12)})
    with pytest.raises(FormatError, match="another size than the pickle declares"):
        remembering.read_index(MemorySource(wrong), Limits())


def test_located_storages_are_not_located_again() -> None:
    content = saved({"w": torch.ones(2)})
    index = index_of(content)
    located = Index(
        format="torch-zip",
        files=index.files,
        tree={},
        storages=tuple(
            type(record)(file=0, offset=record.offset, nbytes=8, key="0", located=True) for record in index.storages
        ),
    )
    assert TorchZip().locate(MemorySource(content), located, [0]) == {}


def test_a_local_header_changed_after_indexing() -> None:
    content = bytearray(saved([torch.ones(2), torch.zeros(3)]))
    index = index_of(bytes(content))
    content[content.find(b"archive/data/0")] ^= 1
    with pytest.raises(FormatError, match="'archive/data/0'"):
        TorchZip().locate(MemorySource(bytes(content)), index, [0])
    assert TorchZip().locate(MemorySource(bytes(content)), index, [1])


def test_the_last_storage_is_checked_while_indexing() -> None:
    content = bytearray(saved([torch.ones(2), torch.zeros(3)]))
    content[content.find(b"archive/data/1") - 2] += 64  # its padding, so that it reaches into the next record
    with pytest.raises(FormatError, match="reaches into what follows"):
        index_of(bytes(content))


def test_padding_that_reaches_into_the_next_storage() -> None:
    content = bytearray(saved([torch.ones(2), torch.zeros(3)]))
    content[content.find(b"archive/data/0") - 2] += 64
    index = index_of(bytes(content))
    with pytest.raises(FormatError, match="reaches into what follows"):
        TorchZip().locate(MemorySource(bytes(content)), index, [0])


# What is refused


W = {"w": tensor_call(storage("0", 4), shape=(4,))}

DATA = {"0": bytes(16)}


def with_records(**records: bytes | None) -> bytes:
    return torch_archive(W, DATA, records={name.replace("__", "."): data for name, data in records.items()})


def test_the_honest_file_that_the_others_change() -> None:
    assert tree_of(torch_archive(W, DATA))["w"].shape == (4,)


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (torch_archive(W, DATA, records={"constants.pkl": b""}), UnsupportedError, "TorchScript"),
        (torch_archive(W, DATA, records={"data.pkl": None}), FormatError, "no data.pkl"),
        (torch_archive(W, {}), FormatError, "no record for storage '0'"),
        (torch_archive(W, {"0": bytes(15)}), FormatError, "another size"),
        (torch_archive(W, {"0": bytes(17)}), FormatError, "another size"),
        (torch_archive(W, {"0": b""}), FormatError, "another size"),
        (torch_archive(pickled(W) + b"."), FormatError, "bytes follow the pickle"),
        (torch_archive(pickled(W) + pickled(W)), FormatError, "bytes follow the pickle"),
        (torch_archive(b""), FormatError, "not a pickle"),
        (torch_archive(W, DATA, records={"byteorder": b"middle"}), FormatError, "byte order"),
        (torch_archive(W, DATA, records={"byteorder": b""}), FormatError, "byte order"),
        (torch_archive(W, DATA, records={"byteorder": b"little\n"}), FormatError, "byte order"),
        (torch_archive(W, DATA, records={"byteorder": bytes(65)}), LimitError, "more than 64 bytes"),
        (torch_archive(W, DATA, records={"byteorder": b"big"}), UnsupportedError, "big-endian"),
        (torch_archive(W, DATA, records={"version": None}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": b"99"}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": b"0"}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": b"-1"}), FormatError, "version"),
        (torch_archive(W, DATA, records={"version": "³".encode("latin1")}), FormatError, "version"),
        (torch_archive(W, DATA, records={".data/version": b"99"}), FormatError, "version"),
        (torch_archive(W, DATA, records={".storage_alignment": b"-1"}), FormatError, "alignment"),
        (torch_archive(W, DATA, records={".storage_alignment": b"0"}), FormatError, "alignment"),
        (torch_archive(W, DATA, records={".storage_alignment": b"1e9"}), FormatError, "alignment"),
        (torch_archive(W, DATA, records={".storage_alignment": b"1000000000"}), FormatError, "alignment"),
        (torch_archive({"w": tensor_call(storage("../x", 4), shape=(4,))}, DATA), FormatError, "no record for storage"),
        (torch_archive({"w": tensor_call(storage("", 4), shape=(4,))}, DATA), FormatError, "no record for storage"),
        (torch_archive(Call(Global("my.module", "Model"))), UnsafeContentError, "whole my.module.Model object"),
        (torch_archive(Global("os", "system")), UnsafeContentError, "whole os.system object"),
        (torch_archive(Call(Global("os", "system"), ("exit 1",))), UnsafeContentError, "whole os.system object"),
        (torch_archive(storage("0", 4), DATA), UnsupportedError, "no tensor views"),
        (torch_archive({"w": Raw(encode(("a", 1)) + b"P0\n")}), UnsafeContentError, "PERSID"),
    ],
)
def test_bad_files(content: bytes, kind: type[SluiceError], problem: str) -> None:
    with pytest.raises(kind, match=problem) as caught:
        index_of(content)
    assert caught.value.file == "memory"


def test_files_without_the_newer_records() -> None:
    index = index_of(torch_archive(W, DATA, records={"byteorder": None}))
    assert index.metadata["byteorder"] == "little"
    assert index_of(torch_archive(W, DATA, records={"version": None, ".data/version": b"3\n"}))


def test_a_refused_view_is_named() -> None:
    value = {"model": {"layers.0": [tensor_call(storage("0", 4), shape=(5,))]}}
    with pytest.raises(FormatError, match="past the end of its storage '0'") as caught:
        index_of(torch_archive(value, DATA))
    assert caught.value.tensor == "model.layers.0.0"
    assert caught.value.found == "20 bytes"


def test_a_wrong_checksum_of_the_pickle() -> None:
    records = [
        ArchiveRecord(name=b"a/data.pkl", data=pickled(W), crc=1),
        ArchiveRecord(name=b"a/data/0", data=bytes(16), crc=1),  # of data: not this check's work
        ArchiveRecord(name=b"a/version", data=b"3\n"),
    ]
    with pytest.raises(IntegrityError, match=r"'a/data.pkl' has another CRC-32"):
        index_of(build_archive(records))
    records[0] = ArchiveRecord(name=b"a/data.pkl", data=pickled(W), crc=0)
    assert index_of(build_archive(records)).storages


def test_two_keys_that_differ_in_case() -> None:
    value = [tensor_call(storage("a", 1), shape=(1,)), tensor_call(storage("A", 1), shape=(1,))]
    content = torch_archive(value, {"a": bytes(4)})
    with pytest.raises(FormatError):
        TorchZip().locate(MemorySource(content), index_of(content), [0, 1])


class Subclass(torch.Tensor):
    """A tensor subclass."""


def kinds() -> Mapping[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and quantized tensors are announced as experimental or deprecated
        dense = torch.eye(3)
        return {
            "sparse": dense.to_sparse(),
            "sparse rows": dense.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            "meta": torch.empty(3, device="meta"),
            "subclass": dense.as_subclass(Subclass),
            "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
            "negated": torch.ones(2, dtype=torch.complex64).conj().imag,
        }


@pytest.mark.parametrize("kind", kinds())
@PROTOCOLS
def test_other_kinds_of_tensor_are_named(kind: str, protocol: int) -> None:
    content = saved({"plain": torch.ones(2), "list": [kinds()[kind]]}, protocol)
    with pytest.raises(UnsupportedError, match=kind[:6]) as caught:
        index_of(content)
    assert caught.value.tensor == "list.0"


@PROTOCOLS
def test_a_whole_module(protocol: int) -> None:
    content = saved(torch.nn.Linear(2, 2), protocol)
    with pytest.raises(UnsafeContentError, match=r"whole torch.nn.modules.linear.Linear object"):
        index_of(content)
    leaf = tree_of(saved({"model": torch.nn.Linear(2, 2), "step": 1}, protocol))
    assert leaf == {"model": Opaque(qualified_name="torch.nn.modules.linear.Linear"), "step": 1}


def test_a_torch_script_program(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is announced as deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        index_of(path.read_bytes())


def test_an_archive_of_something_else() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    with pytest.raises(FormatError, match="has no data"):
        index_of(buffer.getvalue())


def test_limits_on_the_pickle() -> None:
    content = saved({str(number): torch.ones(1) for number in range(20)})
    assert index_of(content, Limits(entries=30))
    with pytest.raises(LimitError, match="records"):
        index_of(content, Limits(entries=20))
    with pytest.raises(LimitError, match="bytes"):
        index_of(content, Limits(header_bytes=500))


# Damage


def small_file() -> bytes:
    state_dict = collections.OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, dtype=torch.int16))
    return saved({"model": state_dict, "step": 5, "lr": [0.5, None]})


def test_every_prefix_of_a_file_is_refused() -> None:
    content = small_file()
    for size in range(len(content)):
        with pytest.raises((TruncatedError, FormatError)):
            index_of(content[:size])


def tensors_of(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors_of(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in tensors_of(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def holds_opaque(tree: object) -> bool:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return isinstance(tree, Opaque) or any(map(holds_opaque, children))


def check_edited(content: bytes) -> bool:
    """Return whether an edited file is accepted; then it must be what torch loads, where torch loads it."""
    source = MemorySource(content)
    try:
        index = TorchZip().read_index(source, Limits())
        comparison = Comparison(source, index)
    except SluiceError as error:
        assert isinstance(error, CheckpointError)
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = torch.load(io.BytesIO(content), weights_only=True)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        pickle.UnpicklingError,
        AssertionError,
        KeyError,
        EOFError,
        AttributeError,
    ):
        return True
    if not holds_opaque(index.tree):
        comparison.check(index.tree, expected)
    return True


def test_changed_bytes_give_a_typed_error_or_what_torch_loads() -> None:
    content = small_file()
    edits = [
        (position, changed)
        for position in range(len(content))
        for changed in {0, 0xFF, content[position] ^ 0x80, content[position] ^ 0x01}
    ]
    accepted = 0
    for position, changed in random.Random(0).sample(edits, 600):
        accepted += check_edited(content[:position] + bytes([changed]) + content[position + 1 :])
    assert accepted  # padding, dates and tensor data


@pytest.mark.long
def test_all_changed_bytes_give_a_typed_error_or_what_torch_loads() -> None:
    content = small_file()
    for position in range(len(content)):
        for changed in {0, 0xFF, content[position] ^ 0x80, content[position] ^ 0x01}:
            check_edited(content[:position] + bytes([changed]) + content[position + 1 :])


# Cost


MEASURE = """
import sys
from sluice._options import Limits
from sluice.formats._pickle import Unpickler
from sluice.formats._torch_zip import TorchZip
from sluice.sources._local import LocalFile

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

source = LocalFile(sys.argv[1])
before = peak()
index = TorchZip().read_index(source, Limits())
assert not {"torch", "numpy"} & sys.modules.keys()
print(len(index.storages), peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_memory_of_a_large_index_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    tensors = {
        f"model.layers.{number // 10}.block.{number % 10}.weight": torch.ones(1 + number % 10)
        for number in range(30_000)
    }
    torch.save(tensors, path)
    result = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, result.stdout.split())
    assert count == 30_000
    assert grown_kib <= count * 1.0


TIMES = """
import sys, time
path = sys.argv[2]
if sys.argv[1] == "torch":
    import torch
    start = time.process_time()
    torch.load(path, map_location="meta", weights_only=True)
else:
    from sluice._options import Limits
    from sluice.formats._pickle import Unpickler
from sluice.formats._torch_zip import TorchZip
    from sluice.sources._local import LocalFile
    start = time.process_time()
    TorchZip().read_index(LocalFile(path), Limits())
print(time.process_time() - start)
"""


@pytest.mark.long
def test_indexing_takes_a_third_of_the_time_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    torch.save({f"layers.{number}.weight": torch.ones(1 + number % 10) for number in range(100_000)}, path)
    seconds: dict[str, list[float]] = {"sluice": [], "torch": []}
    for _ in range(3):
        for who, found in seconds.items():
            command = [sys.executable, "-c", TIMES, who, str(path)]
            found.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert statistics.median(seconds["sluice"]) <= statistics.median(seconds["torch"]) / 3
