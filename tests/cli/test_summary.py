"""The nested object of a checkpoint as lines, and its summary: figures, JSON and printed text."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice.cli.commands.inspect import outline
from sluice.cli.summary import summarise, to_json
from support.command_line import printed

pytestmark = pytest.mark.usefixtures("directory")


@pytest.fixture
def saved(directory: object) -> str:
    """Return a file of three tensors in two storages; two names share the smaller one."""
    big, shared = torch.ones(2, 256, dtype=torch.bfloat16), torch.ones(4)
    value = {"big": nn.Parameter(big, requires_grad=False), "tied": [shared, shared], "epoch": 3, "loss": float("nan")}
    torch.save({**value, "args": argparse.Namespace()}, "x.pth")
    return "x.pth"


def test_outline_shows_every_kind_of_value(saved: str) -> None:
    assert printed("inspect", saved, "--tree").splitlines()[1:] == [
        "├── big: Parameter bfloat16 [2, 256], 1.00 KiB",
        "├── tied: list of 2",
        "│   ├── [0]: float32 [4], 16 B",
        "│   └── [1]: float32 [4], 16 B",
        "├── epoch: 3",
        "├── loss: nan",
        "└── args: argparse.Namespace (not loaded)",
    ]


def test_a_shortened_outline_is_marked() -> None:
    tree: dict[object, object] = {number: {} for number in range(5)}
    assert list(outline(tree, 2)) == ["├── 0: dict of 0", "├── 1: dict of 0", "└── ... 3 more; --all shows them"]
    assert len(list(outline(tree, 5))) == len(list(outline(tree, None))) == 5
    assert list(outline({"params": [0, 1]}, 2)) == ["└── params: list of 2: [0, 1]"]


def test_json_is_complete_and_bounded(saved: str) -> None:
    value = json.loads(printed("inspect", saved, "--json"))
    common: dict[str, object] = {"layout": "strided", "packing": None, "math_bits": [], "storage_offset": 0}
    plain: dict[str, object] = {**common, "requires_grad": False}
    assert "argparse.Namespace" in "".join(value.pop("notes"))
    assert value == {
        "path": "x.pth",
        "key": None,
        "format": "torch-zip",
        "files": [{"path": "x.pth", "nbytes": os.path.getsize(saved)}],
        "metadata": {"version": "3", "byteorder": "little", "archive": "x"},
        "tensor_bytes": 1056,
        "stored_bytes": 1040,
        "dtypes": {"bfloat16": {"count": 1, "nbytes": 1024}, "float32": {"count": 2, "nbytes": 32}},
        "tensors": [
            plain
            | {"name": "big", "dtype": "bfloat16", "shape": [2, 256], "stride": [256, 1], "nbytes": 1024}
            | {"parameter": True, "storages": [0]},
            *(
                plain
                | {"name": name, "dtype": "float32", "shape": [4], "stride": [1], "nbytes": 16, "storages": [1]}
                | {"parameter": False}
                for name in ("tied.0", "tied.1")
            ),
        ],
        "storages": [{"key": "0", "file": 0, "nbytes": 1024}, {"key": "1", "file": 0, "nbytes": 16}],
        "state_dicts": [""],
        "shared": [{"storage": 1, "names": ["tied.0", "tied.1"]}],
        "unsupported": [],
        "values": [
            {"name": "epoch", "value": 3},
            {"name": "loss", "text": "nan"},
            {"name": "args", "not_loaded": "argparse.Namespace"},
        ],
    }
    torch.save({"many": list(range(11))}, "many.pth")
    with sluice.open("many.pth") as checkpoint, pytest.raises(sluice.LimitError, match="too many values"):
        to_json(summarise("many.pth", None, checkpoint.index, {}), sluice.Limits(entries=10))


def test_empty_storages_are_not_shared() -> None:
    nothing = torch.empty(0)
    torch.save({"a": nothing, "b": nothing}, "x.pth")
    assert json.loads(printed("inspect", "x.pth", "--json"))["shared"] == []


def test_long_metadata_is_cut_unless_all_is_asked_for() -> None:
    save_file({}, "x.safetensors", metadata={"config": "x" * 5000})
    assert "... (5,000 characters)" in printed("inspect", "x.safetensors")
    assert "x" * 5000 in printed("inspect", "x.safetensors", "--all")
