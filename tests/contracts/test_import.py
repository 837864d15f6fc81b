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
    "sluice.engine.accelerators",
    "sluice.api.load",
    "sluice.checking.comparison",
    "sluice.reading.composites",
    "sluice.api.convert",
    "sluice.loading.devices",
    "sluice.checking.diff",
    "sluice.modules.empty_init",
    "sluice.engine.session",
    "sluice.engine.file_targets",
    "sluice.engine.host_copies",
    "sluice.modules.initial_values",
    "sluice.modules.meta_initialisers",
    "sluice.modules.install",
    "sluice.modules.load_hooks",
    "sluice.loading.module_fill",
    "sluice.loading.module_job",
    "sluice.modules.collect",
    "sluice.loading.optimizer",
    "sluice.modules.custom_loaders",
    "sluice.loading.dry_run",
    "sluice.loading.read_probe",
    "sluice.api.save",
    "sluice.reading.scan",
    "sluice.reading.sparse_indices",
    "sluice.loading.state_dict",
    "sluice.loading.step_hooks",
    "sluice.modules.swap",
    "sluice.hf._symbolic_tensors",
    "sluice.engine.targets",
    "sluice.reading.transfer",
    "sluice.api.verify",
    "sluice.benchmark.child",
    "sluice.benchmark.comparison",
    "sluice.benchmark.machine",
    "sluice.benchmark.methods",
    "sluice.benchmark.peers",
    "sluice.benchmark.process",
    "sluice.benchmark.records",
    "sluice.benchmark.report",
    "sluice.benchmark.results",
    "sluice.benchmark.resuming",
    "sluice.benchmark.runner",
    "sluice.benchmark.sizes",
    "sluice.benchmark.strategies",
    "sluice.benchmark.subjects",
    "sluice.benchmark.summary",
    "sluice.benchmark.table",
    "sluice.benchmark.watching",
    "sluice.benchmark.writing",
    "sluice.benchmark.gpt2",
    "sluice.converting.job",
    "sluice.converting.storages",
    "sluice.converting.stream",
    "sluice.converting.tensor_files",
    "sluice.converting.torch_files",
    "sluice.hf",
    "sluice.hf._configuration",
    "sluice.hf._library",
    "sluice.hf._loading",
    "sluice.hf._names",
    "sluice.testing._accelerator",
    "sluice.checking.verify_plan",
    "sluice.checking.verify_run",
    "sluice.checking.consumers",
    "sluice.writing.write_queue",
    "sluice.writing.chunks",
    "sluice.writing.items",
    "sluice.writing.composites",
    "sluice.writing.torch_pickle",
    "sluice.writing.torch_zip",
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
