"""Legacy torch.save files: the index equals what torch reads, bit for bit, without reading tensor data."""

from __future__ import annotations

import io
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice._dtypes import ITEM_BYTES, dtype_name, torch_dtype
from sluice.records import UnsupportedValue
from support import torch_files
from support.dtypes import TORCH_DTYPES
from support.hostile_archives import Call, Global, Raw, encode, legacy_file, legacy_storage, tensor_call
from support.oracles import loaded, same, save_and_compare, state_dict_of_views
from support.sources import MemorySource

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's own loader reads its own files

#: Dtypes that torch reads back: it writes the others as untyped storages, which its reader refuses.
DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]

SIX = {"7": (6, struct.pack("<6f", *range(6)))}
WEIGHT = legacy_storage("7", 6)


saved, index_of = partial(torch_files.saved, legacy=True), partial(torch_files.index_of, legacy=True)


def check(content: bytes, protocol: int = 2) -> Any:
    """Compare the content of a file with what torch loads from it, and return it."""
    # torch's restricted loader stops at protocol 3
    expected = torch.load(io.BytesIO(content), weights_only=protocol < 4)
    assert same(loaded(MemorySource(content), index_of(content)), expected)
    return expected


# Files that torch.save writes


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str, protocol: int) -> None:
    raw = torch.arange(480).to(torch.uint8) * 37 + 11
    tensor = (raw % 2).view(torch.bool) if name == "bool" else raw.view(torch_dtype(name))
    value = {"t": tensor, "row": tensor[3:5], "scalar": tensor[3].clone(), "empty": tensor.new_empty((0, 3))}
    check(saved(value, protocol), protocol)


@pytest.mark.parametrize("name", sorted(set(TORCH_DTYPES) - set(DTYPES)))
def test_dtypes_that_torch_itself_does_not_read(name: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # for dtypes that torch calls experimental
        content = saved({"w": torch.zeros(16, dtype=torch.uint8).view(torch_dtype(name))})
        with pytest.raises(AttributeError, match="UntypedStorage"):
            torch.load(io.BytesIO(content), weights_only=True)
    index: Any = index_of(content)
    assert isinstance(index.tree["w"], UnsupportedValue)
    assert "untyped storage" in index.tree["w"].reason
    assert [(one.key, one.nbytes) for one in index.storages] == [(index.storages[0].key, 16)]


def test_state_dicts_with_ties_strides_parameters_and_plain_values(tmp_path: Path) -> None:
    value = state_dict_of_views(
        large=torch.randn(1200, 1000),
        step=7,
        nested={"inner": [torch.arange(3), 2.5, None, (True, "text", b"bytes")]},
    )
    ours = save_and_compare(tmp_path / "f.pth", value, _use_new_zipfile_serialization=False)
    assert ours["tied"] is ours["whole"]
    assert ours["rows"].untyped_storage().data_ptr() == ours["whole"].untyped_storage().data_ptr()


# Files of early torch versions


STATE = (WEIGHT, 0, (2, 3), (3, 1))
FLOATS = Global("torch", "FloatTensor")
PARAMETER = Global("torch.nn.parameter", "Parameter")
NO_HOOKS = Call(Global("collections", "OrderedDict"))
TENSOR = Call(FLOATS, (), STATE)


def created(kind: Global, arguments: tuple[object, ...], state: object) -> Raw:
    """An object that is created without a call (NEWOBJ) and then given its state."""
    return Raw(encode(kind) + encode(arguments) + b"\x81" + encode(state) + b"b")


EARLY = {
    "called": TENSOR,
    "created": created(FLOATS, (), STATE),
    "parameter": Call(PARAMETER, (TENSOR,), (True, False, NO_HOOKS)),
    "frozen parameter": created(PARAMETER, (TENSOR,), (False, False, NO_HOOKS)),
    "without hooks": Call(PARAMETER, (TENSOR,), (True, False, None)),
    "long state": created(PARAMETER, (), (TENSOR, None, NO_HOOKS, True, False)),
    "long state of a frozen one": Call(PARAMETER, (), (TENSOR, None, None, False, False)),
}


@pytest.mark.parametrize("kind", EARLY)
def test_tensors_of_the_first_releases(kind: str) -> None:
    assert isinstance(check(legacy_file({"w": EARLY[kind]}, SIX))["w"], torch.Tensor)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[("Double", "float64"), ("Half", "float16"), ("Long", "int64"), ("Int", "int32")],
        *[("Short", "int16"), ("Char", "int8"), ("Byte", "uint8")],
    ],
)
def test_tensor_classes_of_the_first_releases(kind: str, dtype: str) -> None:
    data = bytes(range(3 * ITEM_BYTES[dtype]))
    state = (legacy_storage("7", 3, kind=f"{kind}Storage"), 1, (2,), (1,))
    found = check(legacy_file({"w": Call(Global("torch", f"{kind}Tensor"), (), state)}, {"7": (3, data)}))
    assert dtype_name(found["w"].dtype) == dtype


def test_what_the_memo_holds_of_such_a_tensor_is_the_finished_one() -> None:
    put, get = b"q\x00", b"h\x00"
    first = Raw(encode(Call(FLOATS)) + put + encode(STATE) + b"b")
    index = index_of(legacy_file({"w": first, "tied": Raw(get)}, SIX))
    assert isinstance(index.tree, dict)
    assert index.tree["w"] is index.tree["tied"]


def test_views_of_storages_are_refused_by_name() -> None:
    view = tensor_call(legacy_storage("7", 6, view=("9", 2, 4)), shape=(4,))
    tree: Any = index_of(legacy_file({"part": view, "whole": tensor_call(WEIGHT, shape=(6,))}, SIX)).tree
    assert "a view of a storage, as torch wrote before 0.4" in repr(tree["part"])
    assert tree["whole"].shape == (6,)


# Pickles in windows


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_longer_than_any_window(protocol: int) -> None:
    value = {
        "text": "x" * 3_000_000,
        "data": b"y" * 2_500_000,
        **{f"w{number}": torch.tensor([number]) for number in range(12_000)},
    }
    content = saved(value, protocol)
    assert same(loaded(MemorySource(content), index_of(content)), value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_window_may_end_anywhere(monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    value = {"a": torch.arange(3.0), "b": [1, 2**40, -1.5, "text", b"b", (None, True)], "c": torch.ones(2)}
    value["d"] = value["a"]
    content = saved(value, protocol)
    for size in range(1, 300):
        monkeypatch.setattr("sluice.formats.pickles.unpickler._FIRST_BYTES", size)
        assert same(loaded(MemorySource(content), index_of(content)), value)
