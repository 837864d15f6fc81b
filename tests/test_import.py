"""What importing sluice costs, and that its public names are where they say."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sluice

#: Imports that cost more than the rest of the start together, and that `import sluice` must not make.
_SLOW = ("torch", "numpy", "rich", "click", "psutil", "safetensors")

#: Modules that handle tensors or modules. Nothing else may import torch when it is imported.
_TENSOR_MODULES = {
    "sluice._accelerators",
    "sluice._api",
    "sluice._comparing",
    "sluice._composites",
    "sluice._convert",
    "sluice._devices",
    "sluice._diff",
    "sluice._empty_init",
    "sluice._engine",
    "sluice._file_targets",
    "sluice._host_copies",
    "sluice._initial_values",
    "sluice._initialisers",
    "sluice._install",
    "sluice._load_hooks",
    "sluice._module_load",
    "sluice._module_plan",
    "sluice._modules",
    "sluice._optimizers",
    "sluice._own_loading",
    "sluice._plan",
    "sluice._read_probe",
    "sluice._save",
    "sluice._scan",
    "sluice._sparse_indices",
    "sluice._state_dict",
    "sluice._step_hooks",
    "sluice._swap",
    "sluice._symbolic",
    "sluice._targets",
    "sluice._transfer",
    "sluice._verify",
    "sluice.benchmark._child",
    "sluice.benchmark._comparison",
    "sluice.benchmark._machine",
    "sluice.benchmark._methods",
    "sluice.benchmark._peers",
    "sluice.benchmark._process",
    "sluice.benchmark._records",
    "sluice.benchmark._report",
    "sluice.benchmark._results",
    "sluice.benchmark._resuming",
    "sluice.benchmark._runner",
    "sluice.benchmark._sizes",
    "sluice.benchmark._strategies",
    "sluice.benchmark._subjects",
    "sluice.benchmark._summary",
    "sluice.benchmark._table",
    "sluice.benchmark._watching",
    "sluice.benchmark._writing",
    "sluice.benchmark.gpt2",
    "sluice.converting._job",
    "sluice.converting._storages",
    "sluice.converting._stream",
    "sluice.converting._tensor_files",
    "sluice.converting._torch_files",
    "sluice.hf",
    "sluice.hf._configuration",
    "sluice.hf._library",
    "sluice.hf._loading",
    "sluice.hf._names",
    "sluice.testing._accelerator",
    "sluice.verifying._plan",
    "sluice.verifying._run",
    "sluice.verifying._takers",
    "sluice.writing._ahead",
    "sluice.writing._chunks",
    "sluice.writing._items",
    "sluice.writing._parts",
    "sluice.writing._torch_pickle",
    "sluice.writing._torch_zip",
}


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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod_into'"):
        sluice.lod_into  # type: ignore[attr-defined]  # noqa: B018  the access is the test


def test_import_is_light() -> None:
    code = "import sys, sluice; print([name for name in sys.argv[1:] if name in sys.modules])"
    assert _run(code, *_SLOW).strip() == "[]"


def test_only_modules_that_hold_tensors_import_torch() -> None:
    modules = [module.name for module in pkgutil.walk_packages(sluice.__path__, "sluice.")]
    light = [name for name in modules if name not in _TENSOR_MODULES]
    assert len(light) == len(modules) - len(_TENSOR_MODULES)
    code = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            assert "torch" not in sys.modules, f"{name} imports torch"
    """
    _run(code, *light)
