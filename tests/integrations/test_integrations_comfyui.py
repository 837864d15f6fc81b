"""The node of ComfyUI in integrations/comfyui, over stubs of ComfyUI's modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sluice

NODE = Path(__file__).parents[2] / "integrations" / "comfyui" / "__init__.py"


@pytest.fixture
def node() -> Any:
    spec = importlib.util.spec_from_file_location("sluice_node", NODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_read_as_by_comfyui(node: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, tmp_path / "m.ckpt")
    assert node.load_torch_file(str(tmp_path / "m.ckpt"), safe_load=True)["w"].sum() == 2
    sluice.save({"w": torch.ones(2)}, tmp_path / "m.safetensors", metadata={"a": "b"})
    state, metadata = node.load_torch_file(str(tmp_path / "m.safetensors"), return_metadata=True)
    assert torch.equal(state["w"], torch.ones(2))
    assert metadata["a"] == "b"


def test_the_node_loads_a_checkpoint(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.ckpt")
    paths, comfy, sd = ModuleType("folder_paths"), ModuleType("comfy"), ModuleType("comfy.sd")
    results: list[Any] = [("model", "clip", "vae", "clipvision"), None]
    vars(paths).update(
        get_filename_list=lambda kind: [f"{kind}.ckpt"],
        get_full_path_or_raise=lambda _, name: str(tmp_path / name),
        get_folder_paths=lambda kind: [kind],
    )

    def guess(state: Any, *, embedding_directory: list[str], metadata: Any) -> Any:
        assert (list(state), embedding_directory, metadata) == (["w"], ["embeddings"], None)
        return results.pop(0)

    vars(sd).update(load_state_dict_guess_config=guess)
    vars(comfy).update(sd=sd)
    for module in (paths, comfy, sd):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = node.NODE_CLASS_MAPPINGS["SluiceLoadCheckpoint"]
    assert kind.INPUT_TYPES() == {"required": {"ckpt_name": (["checkpoints.ckpt"],)}}
    assert getattr(kind(), kind.FUNCTION)("m.ckpt") == ("model", "clip", "vae")
    with pytest.raises(RuntimeError, match="does not know"):
        kind().load("m.ckpt")
