"""TorchScript archives have the state dict of ``torch.jit.load``, and nothing in them runs."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import CheckpointError, FormatError, LimitError, UnsupportedError
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import UnsupportedValue
from support.hostile_archives import (
    ArchiveRecord,
    Raw,
    build_archive,
    encode,
    pickled,
    storage,
    tensor_call,
    torch_archive,
)
from support.sources import MemorySource
from support.torch_files import tree_of

W = tensor_call(storage("0", 4), shape=(4,))


class Net(nn.Module):
    """Tied weights, buffers of both kinds, a tensor that is neither, and containers."""

    tied: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU())
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.arange(4.0))
        self.state = torch.full((2,), 3.0)
        self.sizes = [1, 2]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        pooled = self.blocks(values).mean((2, 3))
        return torch.as_tensor(self.tail(self.head(pooled)) * self.scale + self.state.sum() + self.sizes[0])


def script(path: Path, *, traced: bool) -> tuple[Net, dict[str, torch.Tensor]]:
    model = Net().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        compiler: Any = torch.jit
        made = compiler.trace(model, torch.ones(1, 3, 4, 4)) if traced else compiler.script(model)
        made.save(str(path))
        return model, compiler.load(str(path)).state_dict()


@pytest.mark.parametrize("traced", [False, True], ids=["scripted", "traced"])
def test_the_state_dict_is_that_of_torch_and_fills_the_eager_class(tmp_path: Path, traced: bool) -> None:
    _, expected = script(tmp_path / "m.pt", traced=traced)
    found = sluice.load_state_dict(tmp_path / "m.pt")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
        assert not found[name].requires_grad
    model = Net()
    report = sluice.load_into(model, tmp_path / "m.pt")
    assert report.loaded == len(expected) - 1  # of two tied names
    assert model.tail.weight is model.head.weight
    assert torch.equal(model.state_dict()["blocks.1.running_var"], expected["blocks.1.running_var"])
    with sluice.open(tmp_path / "m.pt") as checkpoint:
        assert checkpoint.format == "torch-script"
        assert checkpoint["head.weight"].storage_key == checkpoint["tail.weight"].storage_key
    checked = sluice.verify(tmp_path / "m.pt")
    assert checked.ok
    left_out = "Tensors of the program that are neither parameters nor buffers, left out (1): state."
    assert (left_out in checked.notes) is not traced  # a trace keeps it as a constant


def test_every_verb_takes_an_archive(tmp_path: Path) -> None:
    _, expected = script(tmp_path / "m.pt", traced=False)
    sluice.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert sluice.diff(tmp_path / "m.pt", tmp_path / "m.safetensors").same
    assert sluice.plan(Net(), tmp_path / "m.pt").format == "torch-script"
    model = Net().eval()
    with torch.no_grad(), sluice.stream(model, tmp_path / "m.pt", memory="32MiB"):
        result = model(torch.ones(1, 3, 4, 4))
    eager = Net().eval()
    eager.load_state_dict(expected)
    assert torch.equal(result, eager(torch.ones(1, 3, 4, 4)))


def test_frozen_programs_are_refused_by_name(tmp_path: Path) -> None:
    compiler: Any = torch.jit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        compiler.freeze(compiler.script(nn.Linear(3, 2).eval())).save(str(tmp_path / "m.pt"))
    with pytest.raises(UnsupportedError, match=r"frozen TorchScript program.* before torch\.jit\.freeze"):
        sluice.open(tmp_path / "m.pt")


def test_damaged_code_is_found_by_verify(tmp_path: Path) -> None:
    script(tmp_path / "m.pt", traced=False)
    content = bytearray((tmp_path / "m.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/linear.py"))
    name, extra = struct.unpack_from("<HH", content, record.header_offset + 26)
    at = record.header_offset + 30 + name + extra + record.compress_size // 2
    content[at : at + 4] = bytes(byte ^ 0xFF for byte in content[at : at + 4])
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError):
        sluice.open(tmp_path / "m.pt")


def module(attributes: dict[str, object], kind: str = "Net") -> Raw:
    """Return the opcodes of a module of a class of the archive."""
    return Raw(f"c__torch__\n{kind}\n".encode() + b")\x81" + encode(attributes) + b"b")


CODE = b'class Net(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = ["b", ]\n  w : Tensor\n'


def archive(value: object, code: bytes = CODE) -> bytes:
    records: dict[str, bytes | None] = {"constants.pkl": pickled(()), "code/__torch__.py": code}
    return torch_archive(value, {"0": bytes(16)}, records=records)


def test_archives_without_declarations_have_all_tensors() -> None:
    inner = module({"x": W}, "Other")
    assert list(tree_of(archive(module({"w": W, "x": W, "inner": inner, "n": 3})))) == ["w"]
    assert list(tree_of(archive(module({"w": W, "x": W, "inner": inner}), b""))) == ["w", "x", "inner.x"]


def test_objects_that_need_code_are_leaves() -> None:
    restored = Raw(b"c__torch__.torch.classes.quantized\nPacked\n)\x81" + encode((W, 1)) + b"b")
    leaf = tree_of(archive(module({"w": restored})))["w"]
    assert isinstance(leaf, UnsupportedValue)
    assert leaf.qualified_name == "__torch__.torch.classes.quantized.Packed"


def packed(data: bytes, nbytes: int, crc: int | None = None) -> bytes:
    names = {b"data.pkl": pickled(module({"w": W})), b"data/0": bytes(16), b"version": b"3\n", b"constants.pkl": b""}
    records = [ArchiveRecord(name=b"a/" + name, data=content) for name, content in names.items()]
    records.append(ArchiveRecord(name=b"a/code/__torch__.py", data=data, method=8, nbytes=nbytes, crc=crc))
    return build_archive(records)


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (archive({"w": W}), FormatError, "does not hold a module; found dict"),
        (archive(module({"a": module({"b.w": W}), "a.b": module({"w": W})}), b""), FormatError, "have one path"),
        (archive(module({"w": tensor_call(storage("0", 4), shape=(5,))})), FormatError, "past the end of its storage"),
        (archive(Raw(b"c__torch__\nNet\n)\x81")), FormatError, "an object has no state"),
        (archive(Raw(b"c__torch__\nNet\n)\x81q\0}(X\1\0\0\0ah\0ub")), FormatError, "an object has no state"),
        (packed(b"\xff\xff", 40), CheckpointError, "CRC-32 of record 'a/code/__torch__.py'"),
        (packed(b"\3\0", 2**31), LimitError, "'a/code/__torch__.py' has more than 100000000 bytes"),
    ],
)
def test_hostile_archives(content: bytes, kind: type[CheckpointError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        TorchZipFormat().read_index(MemorySource(content), sluice.Limits())


def test_compressed_data_is_still_refused() -> None:
    content = packed(b"\3\0", 0).replace(b"a/code/__torch__.py", b"a/data/__torch__.py")
    with pytest.raises(UnsupportedError, match=r"'a/data/__torch__\.py' is compressed"):
        TorchZipFormat().read_index(MemorySource(content), sluice.Limits())
