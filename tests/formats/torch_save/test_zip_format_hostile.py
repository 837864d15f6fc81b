"""Damaged and hostile torch zip files: each raises a typed error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from sluice._errors import (
    FormatError,
    LimitError,
    SluiceError,
    TruncatedError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice.records import Entry, Opaque, UnsupportedValue
from support.hostile_archives import (
    Call,
    Global,
    pickled,
    storage,
    tensor_call,
    torch_archive,
)
from support.torch_files import PROTOCOLS, index_of, saved, tree_of

W = {"w": tensor_call(storage("0", 4), shape=(4,))}

DATA = {"0": bytes(16)}


def test_the_valid_file_that_other_tests_change() -> None:
    assert tree_of(torch_archive(W, DATA))["w"].shape == (4,)


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
        (torch_archive(W, DATA, records={".storage_alignment": b"-1"}), FormatError, "alignment"),
        (torch_archive(W, DATA, records={".storage_alignment": b"0"}), FormatError, "alignment"),
        (torch_archive(W, DATA, records={".storage_alignment": b"1000000000"}), FormatError, "alignment"),
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


class Subclass(torch.Tensor):
    """A tensor subclass."""


def kinds() -> Mapping[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are announced as a prototype
        nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)
    return {
        "meta": torch.empty(3, device="meta"),
        "subclass": torch.eye(3).as_subclass(Subclass),
        "nested": nested,
    }


@pytest.mark.parametrize("kind", kinds())
@PROTOCOLS
def test_other_kinds_of_tensor_are_named(kind: str, protocol: int) -> None:
    content = saved({"plain": torch.ones(2), "list": [kinds()[kind]]}, protocol)
    tree: Any = index_of(content).tree
    assert isinstance(tree["plain"], Entry)
    leaf = tree["list"][0]
    assert isinstance(leaf, UnsupportedValue)
    assert kind in leaf.reason
    assert ("Subclass" if kind == "subclass" else kind) in leaf.qualified_name


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
