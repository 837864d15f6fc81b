"""A fixture: checkpoints of the tiny benchmark model, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice.benchmark.gpt2 import make_checkpoint
from sluice.benchmark.records import PARAMETERS, PTH, SAFETENSORS, SHARDS, Kind
from support.directories import SAFETENSORS_INDEX, save_sharded


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
    items = list(load_file(made[SAFETENSORS]).items())
    save_sharded(
        made[SHARDS], SAFETENSORS_INDEX, {"1.safetensors": dict(items[::2]), "2.safetensors": dict(items[1::2])}
    )
    return made
