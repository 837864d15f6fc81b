"""The nested object of a checkpoint as lines, and its summary: figures, JSON and printed text."""

from __future__ import annotations

import json

import pytest

import sluice
from sluice.cli.commands.inspect import outline
from sluice.cli.output import print_sections
from sluice.cli.summary import Summary, summarise, to_json
from sluice.entries.tree import flatten
from sluice.records import Entry, Index, Storage, elements_of
from support.command_line import index_of_three


def test_outline_shows_every_kind_of_value() -> None:
    assert list(outline(index_of_three().tree, None)) == [
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


def test_outline_of_a_tree_with_countless_places_is_lazy() -> None:
    tree: list[object] = [1]
    for _ in range(60):
        tree = [tree, tree]
    assert next(outline(tree, None)).startswith("├── [0]: list of 2")


_HOSTILE = "w\x1b[31m[red]:smile:\u202e\nEND"


def summary_of(index: Index | None = None) -> Summary:
    index = index or index_of_three()
    return summarise("x.pth", None, index, flatten(index.tree, sluice.Limits()))


def test_empty_storages_are_not_shared() -> None:
    nothing = Entry(elements=elements_of("float32"), shape=(0,), stride=(1,), storage=0)
    index = index_of_three(storages=(Storage(file=0, offset=0, nbytes=0, key="0"),), tree={"a": nothing, "b": nothing})
    assert summary_of(index).shared == {}


def test_json_is_complete() -> None:
    value = json.loads(json.dumps(to_json(summary_of(), sluice.Limits())))
    common: dict[str, object] = {"layout": "strided", "packing": None, "math_bits": [], "storage_offset": 0}
    plain: dict[str, object] = {**common, "requires_grad": False}
    assert value == {
        "path": "x.pth",
        "key": None,
        "format": "torch-zip",
        "files": [{"path": "x.pth", "nbytes": 2048}],
        "metadata": {},
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
        "notes": ["A note."],
    }


def test_json_is_bounded() -> None:
    with pytest.raises(sluice.LimitError, match="too many values"):
        to_json(summary_of(index_of_three(tree={"many": list(range(11))})), sluice.Limits(entries=10))


def test_long_metadata_is_cut_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    index = index_of_three(metadata={"config": "x" * 5000})
    print_sections(summary_of(index).sections(everything=False))
    assert "... (5,000 characters)" in capsys.readouterr().out
    print_sections(summary_of(index).sections(everything=True))
    assert "x" * 5000 in capsys.readouterr().out
