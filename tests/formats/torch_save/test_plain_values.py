"""Plain values that torch's pickles name: the result of each global, and refused arguments."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest

from sluice._errors import CheckpointError, FormatError, LimitError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Constructor, KeyGuard
from sluice.formats.torch_save.plain_values import PlainValues, is_torch_name, plain_global
from sluice.records import TorchSize, TorchText


def build(module: str, name: str, *arguments: object, pickle_bytes: int = 1000) -> Any:
    values = PlainValues(KeyGuard(Limits()), pickle_bytes)
    found: Any = values.names().get((module, name)) or plain_global(module, name)
    constructor = found if isinstance(found, Constructor) else Constructor(qualified_name=name, build=found)
    return constructor.build(arguments)


@pytest.mark.parametrize(
    ("module", "name", "arguments", "expected"),
    [
        ("builtins", "set", ([1, 2],), {1, 2}),
        ("__builtin__", "set", (), set()),
        ("builtins", "frozenset", (["a"],), frozenset("a")),
        ("builtins", "bytes", (), b""),
        ("builtins", "bytearray", (b"xy",), bytearray(b"xy")),
        ("builtins", "complex", (1.0, -2.0), 1 - 2j),
        ("_codecs", "encode", ("\xff\x00", "latin1"), b"\xff\x00"),
        ("collections", "OrderedDict", ([["a", 1], ("b", 2)],), OrderedDict(a=1, b=2)),
        ("collections", "Counter", ({"a": 2},), Counter(a=2)),
        ("collections", "defaultdict", ("factory",), {}),
        ("torch", "Size", ((2, 3),), TorchSize((2, 3))),
        ("torch", "device", ("cuda", 1), TorchText("cuda:1")),
        ("torch", "device", ("cpu",), TorchText("cpu")),
        ("torch.serialization", "_get_layout", ("torch.strided",), TorchText("torch.strided")),
    ],
)
def test_each_global_builds_its_value(module: str, name: str, arguments: tuple[object, ...], expected: object) -> None:
    found = build(module, name, *arguments)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("module", "name", "arguments", "problem"),
    [
        ("builtins", "set", (5,), "invalid arguments"),
        ("builtins", "set", ([1], [2]), "invalid arguments"),
        ("builtins", "set", ([[]],), "unsupported type list"),
        ("builtins", "bytes", (10**12,), "invalid arguments"),
        ("builtins", "complex", (1, 2), "two floats"),
        ("_codecs", "encode", ("x", "rot13"), "that picklers do not use"),
        ("_codecs", "encode", ("\u0100", "latin1"), "above 255"),
        ("collections", "OrderedDict", ([("a",)],), "pairs of key and value"),
        ("collections", "defaultdict", ("factory", {"a": 1}), "initial items"),
        ("torch", "Size", ((2, True),), "not an integer"),
        ("torch", "device", ("cuda", 128), "a type and an index"),
        ("torch", "device", (), "a type and an index"),
        ("torch.serialization", "_get_layout", (5,), "name of a layout"),
    ],
)
def test_other_arguments_are_refused(module: str, name: str, arguments: tuple[object, ...], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        build(module, name, *arguments)


def test_a_pickle_may_copy_twice_its_size() -> None:
    copied: Any = PlainValues(KeyGuard(Limits()), 100).names()["builtins", "bytes"]
    assert copied((bytes(200),)) == bytes(200)
    with pytest.raises(LimitError, match="copy more bytes"):
        copied((b"x",))


def test_names_of_dtypes_and_quantization_schemes() -> None:
    assert plain_global("torch", "float32") == TorchText("torch.float32")
    assert is_torch_name("torch.quint4x2")
    assert is_torch_name("per_tensor_affine")
    assert not is_torch_name("torch.device")
    assert is_torch_name("torch.float33")  # as a later torch may name a dtype
    assert not is_torch_name("torch.floats")


def test_an_encoding_error_keeps_its_cause() -> None:
    with pytest.raises(FormatError) as caught:
        build("_codecs", "encode", "\u0100", "latin1")
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)
