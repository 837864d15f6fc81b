"""The metadata of the package, and the checks of its wheel."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from tools.check_package import _problems

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_classifiers_name_the_versions_that_are_tested() -> None:
    names = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", each) for each in PROJECT["classifiers"]]
    minors = [int(found[1]) for found in names if found]
    assert PROJECT["requires-python"] == f">=3.{min(minors)}"
    pages = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"Python 3.{min(minors)} to 3.{max(minors)}" in pages
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert not any(each.startswith("License ::") for each in PROJECT["classifiers"])  # the expression says it


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
