"""A fixture: checkpoints of the tiny benchmark model, written once per session."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.benchmark.gpt2 import make_checkpoint
from sluice.benchmark.records import DCP, PARAMETERS, PTH, SAFETENSORS, SHARDS, TENSORS, Kind


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """Return the tiny model's checkpoint of each kind that a method reads."""
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def write_checkpoints(folder: Path) -> dict[Kind, Path]:
    """Write the tiny model's checkpoint of each kind that a method reads."""
    made = {kind: folder / f"tiny{kind}" for kind in (PTH, SAFETENSORS)}
    made |= {PARAMETERS: folder / "parameters", SHARDS: folder / "shards"}
    make_checkpoint(made[PTH], "tiny", torch.float32, "torch")
    make_checkpoint(made[SAFETENSORS], "tiny", torch.float32, "safetensors")
    make_checkpoint(made[PARAMETERS], "tiny", torch.float32, "per-parameter")
    made[DCP] = folder / "tiny.dcp"
    make_checkpoint(made[DCP], "tiny", torch.float32, "dcp")
    _split(made[SAFETENSORS], made[SHARDS])
    if find_spec("tensorizer"):
        made[TENSORS] = folder / "tiny.tensors"
        make_checkpoint(made[TENSORS], "tiny", torch.float32, "tensorizer")
    return made


def _split(whole: Path, folder: Path) -> None:
    """Write a checkpoint as two parts with an index."""
    folder.mkdir()
    tensors = load_file(whole)
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == part}, folder / part)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
