"""The layers in docs/design.md are those of the import contract, and every package says what it is for."""

from __future__ import annotations

import pytest

from tools.layers_picture import PAGE, ROOT, drawn_block, expected_block, head, layers, picture, torch_free

NAMES = [name for row in layers() for name in row]


def test_the_page_has_the_layers_of_the_contract() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert drawn_block(page) == expected_block(), "run `python tools/layers_picture.py --write`"


def test_the_picture_has_one_entry_for_each_name_in_the_order_of_the_contract() -> None:
    lines = picture().splitlines()
    entries = [line[4:].split()[0] for line in lines if line[4] != " "]
    assert [entry.removesuffix("*") for entry in entries] == NAMES
    assert {entry.removesuffix("*") for entry in entries if entry.endswith("*")} == torch_free()
    assert [int(line[:4]) for line in lines if line[:4].strip()] == list(range(1, len(layers()) + 1))


def test_the_contract_names_every_module_below_the_root() -> None:
    package = ROOT / "src" / "sluice"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert sorted(NAMES) == sorted(modules | packages)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_one_sentence(name: str) -> None:
    assert head(name).endswith(".")
    assert len(head(name)) > 20
