"""Checkpoints of the tiny model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.benchmark.gpt2 import make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the tiny model's checkpoint for each ending that a method reads; a folder for the empty one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {".pth": folder / "tiny.pth", ".safetensors": folder / "tiny.safetensors", "": folder / "parameters"}
    make_checkpoint(made[".pth"], "tiny", torch.float32, "torch")
    make_checkpoint(made[".safetensors"], "tiny", torch.float32, "safetensors")
    make_checkpoint(made[""], "tiny", torch.float32, "per-parameter")
    return made
