"""Importing sluice is cheap, and each public name is in the module that it reports."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path

import pytest

import sluice

#: Modules that take longer to import than all others together, and that `import sluice` must not import.
_SLOW = ("torch", "numpy", "rich", "click", "psutil", "safetensors")


def _torch_free() -> list[str]:
    """Return the packages that the contract in pyproject.toml forbids to import torch."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    [packages] = [
        contract["source_modules"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract.get("forbidden_modules") == ["torch"]
    ]
    return list(packages)


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_resolves() -> None:
    for name in sluice.__all__:
        assert getattr(sluice, name) is getattr(sluice, name)
        assert name in dir(sluice)


def test_the_names_for_type_checkers_are_the_public_names() -> None:
    tree = ast.parse(Path(inspect.getfile(sluice)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        (alias.name, statement.module)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(name for name, _ in imported) == sorted(sluice.__all__)
    for name, module in imported:
        assert getattr(sys.modules[str(module)], name) is getattr(sluice, name)


def test_every_exception_is_public() -> None:
    from sluice import _errors

    assert set(_errors.__all__) <= set(sluice.__all__)


@pytest.mark.parametrize("module", ["sluice", "sluice.rules", "sluice.measuring", "sluice.testing", "sluice.hf"])
def test_public_names_report_the_module_that_exports_them(module: str) -> None:
    exporter = importlib.import_module(module)
    for name in exporter.__all__:
        thing = getattr(exporter, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__module__ in {module, "sluice", "sluice.measuring"}, name  # the first module that exports it


def test_tracebacks_name_the_public_class() -> None:
    error = traceback.format_exception_only(sluice.FormatError("cut", file="f"))
    assert error[0].startswith("sluice.FormatError: ")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod_into'"):
        sluice.lod_into  # type: ignore[attr-defined]  # noqa: B018  the access is the test


@pytest.mark.parametrize("collecting", [True, False])
def test_the_first_use_of_a_name_leaves_the_garbage_collector_as_it_was(collecting: bool) -> None:
    code = f"import gc, sluice; gc.enable() if {collecting} else gc.disable(); sluice.plan; print(gc.isenabled())"
    assert _run(code).strip() == str(collecting)


def test_import_is_light() -> None:
    code = "import sys, sluice; print([name for name in sys.argv[1:] if name in sys.modules])"
    assert _run(code, *_SLOW).strip() == "[]"


def test_packages_without_tensors_do_not_import_torch() -> None:
    prefixes = tuple(f"{package}." for package in _torch_free())
    modules = [module.name for module in pkgutil.walk_packages(sluice.__path__, "sluice.")]
    ground = [name for name in modules if name.startswith("sluice._") and name != "sluice._private_torch"]
    light = [*ground, "sluice.api.checkpoint", *(name for name in modules if f"{name}.".startswith(prefixes))]
    assert len(light) > 100
    code = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            assert "torch" not in sys.modules, f"{name} imports torch"
    """
    _run(code, *light)
