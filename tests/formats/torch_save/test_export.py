"""Archives of ``torch.export.save`` have the state dict of the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import CheckpointError, FormatError, LimitError, UnsupportedError
from sluice.records import UnsupportedValue
from support.hostile_archives import torch_archive
from support.torch_files import tree_of


class Net(nn.Module):
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


def test_the_state_dict_is_that_of_torch_and_fills_the_eager_class(tmp_path: Path) -> None:
    program = torch.export.export(Net(), (torch.ones(2, 4),))
    torch.export.save(program, tmp_path / "m.pt2")
    if b"archive_format" not in (tmp_path / "m.pt2").read_bytes():
        pytest.skip("this version of torch writes the older layout")
    expected = torch.export.load(tmp_path / "m.pt2").state_dict
    found = sluice.load_state_dict(tmp_path / "m.pt2")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())
        assert (type(found[name]), found[name].requires_grad) == (type(tensor), tensor.requires_grad)
        assert torch.equal(found[name], tensor)
    model = Net()
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


def archive(config: object, **others: object) -> bytes:
    configs = {"model": {"config": config}, **others}
    records: dict[str, bytes | None] = {
        f"data/weights/{name}_weights_config.json": value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in configs.items()
    }
    return torch_archive({}, records={"archive_format": b"pt2", "data/weights/weight_0": bytes(16), **records})


def test_several_models_and_tensors_of_other_kinds() -> None:
    tree = tree_of(archive({"w": weight()}, other={"config": {"w": weight(is_param=False)}}))
    assert tree["model"]["w"].parameter
    assert not tree["other"]["w"].parameter
    tree = tree_of(archive({"p": weight(use_pickle=True), "d": weight(dtype=9), "s": weight(layout=1)}))
    assert all(isinstance(leaf, UnsupportedValue) for leaf in tree.values())
    assert "pickled" in tree["p"].reason


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (torch_archive({}, records={"archive_format": b"pt2"}), UnsupportedError, "without the weights of a program"),
        (archive({}, model=b"{"), FormatError, "not strict JSON"),
        (archive({}, model=b"[" * 100_000), FormatError, "not strict JSON"),
        (archive([]), FormatError, "not strict JSON"),
        (archive({"w": 1}), FormatError, "not strict JSON"),
        (archive({"w": weight(path_name="../x")}), FormatError, "no record for the weight"),
        (archive({"w": weight(sizes=[{"as_int": 3}, {"as_int": 2}])}), FormatError, "past the end of its storage"),
        (archive({"w": weight(sizes=[{"as_int": -1}, {"as_int": 2}])}), FormatError, "not a valid integer"),
        (archive({"w": weight(sizes=[{"as_int": True}])}), FormatError, "not strict JSON"),
        (archive({"w": weight(sizes=None)}), FormatError, "not strict JSON"),
        (archive({"w": weight(strides=[])}), FormatError, "not tuples of equal length"),
        (archive({"w": weight(storage_offset={"as_int": 2**62})}), FormatError, "past the end of its storage"),
        (archive({"w": weight(storage_offset=1)}), FormatError, "not strict JSON"),
        (archive({"w": weight(dtype=12, requires_grad=True)}), FormatError, "invalid requires_grad"),
        (archive({"x" * 2_000_000: weight()}), LimitError, "a name exceeds"),
    ],
)
def test_hostile_archives(tmp_path: Path, content: bytes, kind: type[CheckpointError], problem: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(kind, match=problem):
        sluice.open(tmp_path / "f")


def test_more_tensors_than_the_limit() -> None:
    with pytest.raises(LimitError, match="'entries'; expected at most 6"):
        tree_of(archive({str(number): weight() for number in range(7)}), sluice.Limits(entries=6))
