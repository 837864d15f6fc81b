"""The metadata of the package, the checks of its wheel, the layers in docs/design.md, and the budget of lines."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib

import pytest

from tools import lines
from tools.check_package import _problems
from tools.layers_picture import PAGE, ROOT, drawn_block, expected_block, head, layers, picture, torch_free

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_entry_points_exist() -> None:
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_advice_names_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"].keys()
    for file in (ROOT / "src" / "sluice").rglob("*.py"):
        for named in re.findall(r"sluice\[([\w,]+)\]", file.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{file}: {named}"


@pytest.mark.parametrize(
    ("name", "problem"), [("tests/test_units.py", "does not belong there"), (None, "missing: sluice/py.typed")]
)
def test_what_is_wrong_with_a_wheel_is_named(name: str | None, problem: str) -> None:
    found = _problems(["sluice/__init__.py"] if name is None else [name])
    assert any(each.startswith(problem) for each in found)


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


def test_a_file_without_a_feature_and_a_total_above_the_budget_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines.feature_of("cellar/wine.py") is None
    assert lines.feature_of("loading/optimizer_job.py") == "optimizer resume"
    monkeypatch.setitem(lines.BUDGET, "tests", 10)
    assert lines.main() == 1
    monkeypatch.setattr(lines, "FEATURES", {"core": ("api/*",)})
    assert lines.main() == 1
