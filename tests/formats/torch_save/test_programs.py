"""Archives of TorchScript and of ``torch.export`` have the state dict of the program, and nothing in them runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import CheckpointError, FormatError, IntegrityError, LimitError, UnsupportedError
from sluice.records import UnsupportedValue
from support.hostile_archives import (
    ArchiveRecord,
    Raw,
    build_archive,
    instance,
    pickled,
    storage,
    tensor_call,
    torch_archive,
)
from support.oracles import same
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


def script(path: Path, *, traced: bool = False) -> dict[str, torch.Tensor]:
    model = Net().eval()
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        compiler: Any = torch.jit
        made = compiler.trace(model, torch.ones(1, 3, 4, 4)) if traced else compiler.script(model)
        made.save(str(path))
        state_dict: dict[str, torch.Tensor] = compiler.load(str(path)).state_dict()
        return state_dict


@pytest.mark.parametrize("traced", [False, True], ids=["scripted", "traced"])
def test_the_state_dict_of_a_script_is_that_of_torch_and_fills_the_eager_class(tmp_path: Path, traced: bool) -> None:
    expected = script(tmp_path / "m.pt", traced=traced)
    found = sluice.load_state_dict(tmp_path / "m.pt")
    assert found.keys() == expected.keys()
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    assert not any(tensor.requires_grad for tensor in found.values())
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
    sluice.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert sluice.diff(tmp_path / "m.pt", tmp_path / "m.safetensors").same


def test_frozen_programs_are_refused_by_name(tmp_path: Path) -> None:
    compiler: Any = torch.jit
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        compiler.freeze(compiler.script(nn.Linear(3, 2).eval())).save(str(tmp_path / "m.pt"))
    with pytest.raises(UnsupportedError, match=r"frozen TorchScript program.* before torch\.jit\.freeze"):
        sluice.open(tmp_path / "m.pt")


def module(attributes: dict[str, object], kind: str = "Net") -> Raw:
    return instance("__torch__", kind, attributes)


CODE = b'class Net(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = ["b", ]\n  w : Tensor\n'


def archive(value: object, code: bytes = CODE) -> bytes:
    records: dict[str, bytes | None] = {"constants.pkl": pickled(()), "code/__torch__.py": code}
    return torch_archive(value, {"0": bytes(16)}, records=records)


def test_archives_without_declarations_have_all_tensors() -> None:
    inner = module({"x": W}, "Other")
    assert list(tree_of(archive(module({"w": W, "x": W, "inner": inner, "n": 3})))) == ["w"]
    assert list(tree_of(archive(module({"w": W, "x": W, "inner": inner}), b""))) == ["w", "x", "inner.x"]


def test_objects_that_need_code_are_leaves() -> None:
    leaf = tree_of(archive(module({"w": instance("__torch__.torch.classes.quantized", "Packed", (W, 1))})))["w"]
    assert isinstance(leaf, UnsupportedValue)
    assert leaf.qualified_name == "__torch__.torch.classes.quantized.Packed"


def packed(data: bytes, nbytes: int, crc: int | None = None) -> bytes:
    names = {b"data.pkl": pickled(module({"w": W})), b"data/0": bytes(16), b"version": b"3\n", b"constants.pkl": b""}
    records = [ArchiveRecord(name=b"a/" + name, data=content) for name, content in names.items()]
    records.append(ArchiveRecord(name=b"a/code/__torch__.py", data=data, method=8, nbytes=nbytes, crc=crc))
    return build_archive(records)


def test_compressed_data_is_still_refused() -> None:
    content = packed(b"\3\0", 0).replace(b"a/code/__torch__.py", b"a/data/__torch__.py")
    with pytest.raises(UnsupportedError, match=r"'a/data/__torch__\.py' is compressed"):
        tree_of(content)


class Exported(nn.Module):
    """Tied weights, buffers of both kinds, and a constant."""

    steps: torch.Tensor
    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tail.weight = self.head.weight
        self.mix = nn.Parameter(torch.randn(4, 4).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("rates", torch.ones(4), persistent=False)
        self.extra = torch.full((4,), 2.0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mixed = self.tail(self.head(values)) @ self.mix.to(torch.float32)
        return torch.as_tensor(mixed * self.rates + self.extra + self.steps.sum())


def test_the_state_dict_of_an_export_is_that_of_torch_and_fills_the_eager_class(tmp_path: Path) -> None:
    program = torch.export.export(Exported(), (torch.ones(2, 4),))
    torch.export.save(program, tmp_path / "m.pt2")
    if b"archive_format" not in (tmp_path / "m.pt2").read_bytes():
        pytest.skip("this version of torch writes the older layout")
    expected = torch.export.load(tmp_path / "m.pt2").state_dict
    found = sluice.load_state_dict(tmp_path / "m.pt2")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].stride() == tensor.stride()
        assert same(found[name], tensor)
    model = Exported()
    assert sluice.load_into(model, tmp_path / "m.pt2").loaded == len(expected) - 1
    assert model.tail.weight is model.head.weight
    report = sluice.verify(tmp_path / "m.pt2")
    assert report.ok
    assert report.notes == ("Tensors that only the program uses, its constants, are left out.",)
    sluice.convert(tmp_path / "m.pt2", tmp_path / "m.safetensors")
    assert sluice.diff(tmp_path / "m.pt2", tmp_path / "m.safetensors").same


def weight(**changes: Any) -> dict[str, Any]:
    sizes = {"sizes": [{"as_int": 2}, {"as_int": 2}], "strides": [{"as_int": 2}, {"as_int": 1}]}
    meta = {"dtype": 7, "layout": 7, "requires_grad": True, "storage_offset": {"as_int": 0}, **sizes}
    payload = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
    for name, value in changes.items():
        (payload if name in payload else meta)[name] = value
    return payload


def exported(config: object, **others: object) -> bytes:
    configs = {"model": {"config": config}, **others}
    records: dict[str, bytes | None] = {
        f"data/weights/{name}_weights_config.json": value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in configs.items()
    }
    return torch_archive({}, records={"archive_format": b"pt2", "data/weights/weight_0": bytes(16), **records})


def test_several_models_and_tensors_of_other_kinds() -> None:
    tree = tree_of(exported({"w": weight()}, other={"config": {"w": weight(is_param=False)}}))
    assert tree["model"]["w"].parameter
    assert not tree["other"]["w"].parameter
    tree = tree_of(exported({"p": weight(use_pickle=True), "d": weight(dtype=9), "s": weight(layout=1)}))
    assert all(isinstance(leaf, UnsupportedValue) for leaf in tree.values())
    assert "pickled" in tree["p"].reason


def test_more_tensors_than_the_limit() -> None:
    with pytest.raises(LimitError, match="'entries'; expected at most 6"):
        tree_of(exported({str(number): weight() for number in range(7)}), sluice.Limits(entries=6))


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (archive({"w": W}), FormatError, "does not hold a module; found dict"),
        (archive(module({"a": module({"b.w": W}), "a.b": module({"w": W})}), b""), FormatError, "have one path"),
        (archive(module({"w": tensor_call(storage("0", 4), shape=(5,))})), FormatError, "past the end of its storage"),
        (archive(Raw(b"c__torch__\nNet\n)\x81")), FormatError, "an object has no state"),
        (archive(Raw(b"c__torch__\nNet\n)\x81q\0}(X\1\0\0\0ah\0ub")), FormatError, "an object has no state"),
        (packed(b"\xff\xff", 40), IntegrityError, "CRC-32 of record 'a/code/__torch__.py'"),
        (packed(b"\3\0", 2**31), LimitError, "'a/code/__torch__.py' has more than 100000000 bytes"),
        (torch_archive({}, records={"archive_format": b"pt2"}), UnsupportedError, "without the weights of a program"),
        (exported({}, model=b"{"), FormatError, "not strict JSON"),
        (exported({}, model=b"[" * 100_000), FormatError, "not strict JSON"),
        (exported([]), FormatError, "not strict JSON"),
        (exported({"w": 1}), FormatError, "not strict JSON"),
        (exported({"w": weight(path_name="../x")}), FormatError, "no record for the weight"),
        (exported({"w": weight(sizes=[{"as_int": 3}, {"as_int": 2}])}), FormatError, "past the end of its storage"),
        (exported({"w": weight(sizes=[{"as_int": -1}, {"as_int": 2}])}), FormatError, "not a valid integer"),
        (exported({"w": weight(sizes=[{"as_int": True}])}), FormatError, "not strict JSON"),
        (exported({"w": weight(sizes=None)}), FormatError, "not strict JSON"),
        (exported({"w": weight(strides=[])}), FormatError, "not tuples of equal length"),
        (exported({"w": weight(storage_offset={"as_int": 2**62})}), FormatError, "past the end of its storage"),
        (exported({"w": weight(storage_offset=1)}), FormatError, "not strict JSON"),
        (exported({"w": weight(dtype=12, requires_grad=True)}), FormatError, "invalid requires_grad"),
        (exported({"x" * 2_000_000: weight()}), LimitError, "a name exceeds"),
    ],
)
def test_hostile_archives(content: bytes, kind: type[CheckpointError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        tree_of(content)
