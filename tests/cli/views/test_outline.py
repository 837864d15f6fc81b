"""The nested object of a checkpoint as lines of text."""

from __future__ import annotations

from sluice.cli.views.outline import outline
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
