"""Declared sizes without data, and the limits that refuse them; each limit can be raised by its name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import sluice
from sluice.testing import assert_peak
from support.hostile_archives import Raw, encode, storage, tensor_call, torch_archive
from support.work import at_most

MIB = 1 << 20

DATA = {"0": bytes(16)}
W = tensor_call(storage("0", 4), shape=(4,))


def test_a_view_of_a_trillion_elements_is_never_held(tmp_path: Path) -> None:
    value = {"w": tensor_call(storage("0", 4), shape=(2**20, 2**20), stride=(0, 0))}
    (tmp_path / "f").write_bytes(torch_archive(value, DATA))
    with assert_peak(64 * MIB):
        loaded = sluice.load_state_dict(tmp_path / "f")
        assert loaded["w"].shape == (2**20, 2**20)
        assert loaded["w"].untyped_storage().nbytes() <= 16
        with sluice.open(tmp_path / "f") as checkpoint:
            assert checkpoint["w"][0, :3].read().tolist() == [0.0, 0.0, 0.0]
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(2**20, 2**20, device="meta"))})
        with pytest.raises(sluice.BudgetError, match="host memory"):
            sluice.load_into(model, tmp_path / "f")
        assert model["w"].is_meta


@pytest.mark.parametrize("shape", [(0,), (4,)], ids=["empty tensors", "views of one storage"])
def test_too_many_tensors_meet_a_limit_early(tmp_path: Path, shape: tuple[int, ...]) -> None:
    raw = encode(tensor_call(storage("0", 4), shape=shape))
    body = b"".join(b"X\7\0\0\0%07d" % number + raw for number in range(3_000))
    (tmp_path / "f").write_bytes(torch_archive(b"\x80\x02}(" + body + b"u.", DATA))
    with at_most(4_000_000), assert_peak(64 * MIB), pytest.raises(sluice.LimitError, match="more than") as caught:
        sluice.open(tmp_path / "f", limits=sluice.Limits(entries=2_000))
    assert caught.value.file == str(tmp_path / "f")


LEAVES = {"tensors": encode(W), "numbers": b"K\1", "nothing": b"]", "objects": b"cfoo\nbar\n"}


def doubled(leaf: str, levels: int, kind: str, key: str = "a") -> bytes:
    """Return an archive of nested containers, each with the previous one twice: 2**levels paths."""
    body = b"X" + struct.pack("<I", len(key)) + key.encode() + b"q\0" + LEAVES[leaf] + b"q\1"
    for level in range(levels):
        inner = b"h" + bytes([level + 1])
        body += {
            "list": b"](" + 2 * inner + b"e",
            "tuple": b"(" + 2 * inner + b"t",
            "dict": b"}(h\0" + inner + b"X\1\0\0\0b" + inner + b"u",
        }[kind]
        body += b"q" + bytes([level + 2])
    return torch_archive(b"\x80\x02(" + body + b"t.", DATA)


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_kilobyte_that_declares_a_large_object_is_refused_at_once(tmp_path: Path, leaf: str, kind: str) -> None:
    for content in (*(doubled(leaf, levels, kind) for levels in (18, 23, 40)), doubled(leaf, 16, "dict", "k" * 300)):
        (tmp_path / "f").write_bytes(content)
        with at_most(400_000), assert_peak(64 * MIB), pytest.raises(sluice.LimitError):
            sluice.open(tmp_path / "f")


def test_what_the_limit_on_repeated_places_lets_through_is_small_and_fast(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(doubled("tensors", 14, "list"))
    with at_most(8_000_000), assert_peak(64 * MIB), sluice.open(tmp_path / "f") as checkpoint:
        assert len(checkpoint) == 2**15 - 1


# Limits


def nested(depth: int) -> object:
    value: object = W
    for _ in range(depth):
        value = [value]
    return value


#: For each limit: a value that accepts the file, one that refuses it, and the file.
LIMITED: dict[str, tuple[int, int, Callable[[], bytes]]] = {
    "entries": (9, 4, lambda: torch_archive({str(n): W for n in range(5)}, DATA)),
    "depth": (12, 8, lambda: torch_archive({"w": nested(10)}, DATA)),
    "nodes": (4000, 60, lambda: torch_archive({"w": W, "l": list(range(100))}, DATA)),
    "header_bytes": (4000, 150, lambda: torch_archive({"w": W, "text": "x" * 200}, DATA)),
    "name_bytes": (300, 100, lambda: torch_archive({"w" * 200: W}, DATA)),
    "repeats": (60, 40, lambda: torch_archive({"w": W, "l": [Raw(b"](K\1K\2eq\0"), *[Raw(b"h\0")] * 15]}, DATA)),
    "dimensions": (12, 9, lambda: torch_archive({"w": tensor_call(storage("0", 4), shape=(1,) * 10)}, DATA)),
}


@pytest.mark.parametrize("name", LIMITED)
def test_each_limit_refuses_and_can_be_raised(tmp_path: Path, name: str) -> None:
    enough, tight, make = LIMITED[name]
    (tmp_path / "f").write_bytes(make())
    passing, refused = (replace(sluice.Limits(), **{name: value}) for value in (enough, tight))  # type: ignore[arg-type]
    kind = sluice.FormatError if name == "dimensions" else sluice.LimitError  # torch itself refuses more than 64
    with pytest.raises(kind, match=rf"more than {tight}|longer than {tight}|{name}.*at most {tight}"):
        sluice.open(tmp_path / "f", limits=refused)
    with sluice.open(tmp_path / "f", limits=passing) as checkpoint:
        assert len(checkpoint)


def test_every_limit_is_tested_here_with_directories_or_with_conversions() -> None:
    elsewhere = {"files", "symlinks_outside", "repeated_bytes"}
    assert {field.name for field in fields(sluice.Limits)} == {*LIMITED, *elsewhere}


@pytest.mark.long
def test_a_header_of_a_hundred_megabytes(tmp_path: Path) -> None:
    one = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(f'"model.layers.{n:07d}.self_attn.weight":{one}' for n in range(1_000_000)) + "}").encode()
    assert len(header) < 100_000_000
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header)
    with assert_peak(1024 * MIB), pytest.raises(sluice.LimitError, match="'entries'"):
        sluice.open(tmp_path / "f")
    with sluice.open(tmp_path / "f", limits=sluice.Limits(entries=1_000_000)) as checkpoint:
        assert len(checkpoint) == 1_000_000
