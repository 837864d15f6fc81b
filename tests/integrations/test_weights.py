"""Weights of files in order and in bounded memory; loaders of inference engines over stubs of their base classes."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sluice
from sluice.integrations import _weights
from sluice.integrations._weights import weights
from sluice.reading.reader import CheckpointReader
from support.watching import watch


def test_weights_come_in_file_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{9 - i}": torch.randn(4, i + 1) for i in range(9)}
    torch.save({"model": state, "step": 1}, tmp_path / "a.pt")
    sluice.save({"b": torch.ones(2), "a": torch.ones(3), "half": torch.ones(3).half()}, tmp_path / "b.safetensors")
    monkeypatch.setattr(_weights, "_BATCH_BYTES", 100)
    found = dict(weights([tmp_path / "a.pt", tmp_path / "b.safetensors"], skip=lambda name: name == "a"))
    assert list(found) == [*state, "b", "half"]
    assert all(torch.equal(value, found[name]) for name, value in state.items())
    assert found["half"].dtype == torch.float16
    torch.save({"s": torch.eye(2).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(sluice.UnsupportedError, match="inference engine"):
        next(weights([tmp_path / "s.pt"]))


def test_two_batches_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "_BATCH_BYTES", 4000)
    sluice.save({f"{i:02}": torch.full((1000,), float(i)) for i in range(20)}, tmp_path / "m.safetensors")
    begun: list[int] = []
    watch(monkeypatch, CheckpointReader, "start", lambda _, entries: begun.append(len(entries)))
    for used, (_, tensor) in enumerate(weights([tmp_path / "m.safetensors"])):
        assert tensor[0] == used
        assert len(begun) <= used + 2
    assert begun == [1] * 20


class DefaultModelLoader:
    """That of vllm, as far as it is used: the files of a directory."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config
        self.counter_before_loading_weights = 0.0
        self.local_expert_ids: set[int] | None = None

    def _prepare_weights(self, path: str, *_: object) -> tuple[str, list[str], bool, str]:
        assert self.load_config.load_format in ("hf", "auto")
        return path, [str(file) for file in sorted(Path(path).glob("*.safetensors"), reverse=True)], True, "index"


class SglangDefaultModelLoader(DefaultModelLoader):
    def _prepare_weights(self, *arguments: Any) -> Any:
        return super()._prepare_weights(*arguments)[:3]

    def _filter_mtp_weights(self, found: Any, prefix: str, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"{prefix}{index}.{name}", tensor) for name, tensor in found)


class LoadFormat(StrEnum):
    AUTO = "auto"


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Make modules importable that have these names."""
    for path in modules:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for path, names in modules.items():
        for name, value in names.items():
            setattr(sys.modules[path], name, value)


def source(folder: Path, **more: Any) -> SimpleNamespace:
    common = {"model_or_path": str(folder), "revision": None, "fall_back_to_pt": True, "allow_patterns_overrides": None}
    return SimpleNamespace(**common, prefix="p.", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sluice.save({"b": torch.ones(2), "a": torch.zeros(3)}, tmp_path / "1.safetensors")
    sluice.save({"c": torch.ones(1)}, tmp_path / "2.safetensors")
    return tmp_path


def test_the_load_format_of_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}
    loaders = "vllm.model_executor.model_loader"
    registering = {
        "DefaultModelLoader": DefaultModelLoader,
        "register_model_loader": lambda name: lambda kind: known.setdefault(name, kind),
    }
    skip = {"should_skip_weight": lambda name, local: local is not None and name == "a"}
    install(monkeypatch, {loaders: registering, f"{loaders}.ep_weight_filter": skip})
    from sluice.integrations.vllm import register

    register()
    config = SimpleNamespace(load_format="sluice")
    loader = known["sluice"](config)
    assert config.load_format == "sluice"
    found = list(loader._get_weights_iterator(source(folder, subfolder=None, is_unused_weight=None)))
    assert [name for name, _ in found] == ["p.a", "p.b", "p.c"]
    assert loader.counter_before_loading_weights > 0
    loader.local_expert_ids = {1}
    few = loader._get_weights_iterator(source(folder, subfolder=None, is_unused_weight=lambda name: name == "c"))
    assert [name for name, _ in few] == ["p.b"]


def test_the_class_for_sglang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sluice.integrations.sglang", raising=False)
    added = {"maybe_add_mtp_safetensors": lambda files, _folder, _index, config: files[:config]}
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.configs.load_config": {"LoadFormat": LoadFormat},
        "sglang.srt.model_loader.weight_utils": added,
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": SglangDefaultModelLoader},
    }
    install(monkeypatch, modules)
    from sluice.integrations.sglang import SluiceModelLoader

    monkeypatch.delitem(sys.modules, "sluice.integrations.sglang")
    config = SimpleNamespace(load_format=SluiceModelLoader, draft_model_idx=None)
    loader = SluiceModelLoader(config)
    of_model = source(folder, model_config=SimpleNamespace(hf_config=1))
    assert [name for name, _ in loader._get_weights_iterator(of_model)] == ["p.c"]
    resolved = SimpleNamespace(weight_files=(str(folder / "1.safetensors"),))
    found = loader._get_weights_iterator(of_model, resolved_source=resolved, startup_prefetch_started=True)
    assert [name for name, _ in found] == ["p.a", "p.b"]
    loader.load_config.draft_model_idx = 3
    assert next(loader._get_weights_iterator(source(folder, model_config=None)))[0] == "p.3.c"


#: Methods that the loaders override or call, and their parameters, as found in vllm 0.33.0 and sglang 0.5.23.
METHODS = {
    "vllm/model_executor/model_loader/default_loader.py": {
        "_get_weights_iterator": ["self", "source"],
        "_prepare_weights": [
            "self", "model_name_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides",
        ],
    },
    "sglang/srt/model_loader/loader.py": {
        "_get_weights_iterator": [
            "self", "source", "resolved_source", "startup_prefetch_started", "startup_prefetch_active",
        ],
        "_prepare_weights": [
            "self", "model_name_or_path", "revision", "fall_back_to_pt", "allow_patterns_overrides",
        ],
        "_filter_mtp_weights": ["cls", "weights_iterator", "prefix", "draft_model_idx"],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", METHODS)
def test_an_installed_engine_has_the_methods(path: str) -> None:
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: it needs an accelerator")
    text = (Path(spec.submodule_search_locations[0]) / inside).read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    loader = next(node for node in classes if node.name == "DefaultModelLoader")
    methods = {node.name: node.args for node in loader.body if isinstance(node, ast.FunctionDef)}
    for name, expected in METHODS[path].items():
        assert [each.arg for each in (*methods[name].args, *methods[name].kwonlyargs)] == expected
