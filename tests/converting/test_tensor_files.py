"""Conversions to safetensors: distinct tensors of a state dict."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.tensor_files import _identity
from sluice.writing.aliases import stored_once


def test_a_tensor_is_stored_under_its_first_name(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    value = {"z": weight, "b": torch.nn.Parameter(weight), "part": weight[:3], "e": torch.empty(0), "f": torch.empty(0)}
    torch.save(value, tmp_path / "m.pt")
    checkpoint = OpenCheckpoint.open(tmp_path / "m.pt")
    stored, aliases = stored_once(checkpoint.entries, _identity)
    checkpoint.close()
    assert list(stored) == ["b", "part", "e", "f"]
    assert aliases == {"z": "b"}
