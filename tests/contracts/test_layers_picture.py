"""The layers in docs/design.md match the import contract, and every package has a head."""

from __future__ import annotations

import ast

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


def test_an_internal_package_imports_nothing_when_one_of_its_modules_is_imported() -> None:
    interfaces = {"hf", "measuring", "rules", "safetensors", "testing", "torch"}  # public: __init__ is the interface
    exceptions = {"cli", "records"}  # the entry point of the command; re-exported records
    package = ROOT / "src" / "sluice"
    for path in package.glob("*/**/__init__.py"):
        if path.relative_to(package).parts[0] not in interfaces | exceptions:
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert len(body) == 1, f"{path} has more than its docstring"
            assert isinstance(body[0], ast.Expr)
