"""Names that other writers of safetensors files may have given to tied tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import sluice
from sluice.checkpoint.open_checkpoint import OpenCheckpoint


def test_metadata_of_other_writers_never_becomes_a_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {"format": "pt", "head": "pt", "pt": "head", "author": "unknown"}
    save_file({"pt": torch.arange(3.0)}, path, metadata)
    opened = OpenCheckpoint.open(path)
    try:
        assert opened.stored_names == {"head": "pt"}
    finally:
        opened.close()
    sluice.convert(path, tmp_path / "model.pt")
    converted = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(converted) == ["pt"] == list(sluice.load_state_dict(path))
    sluice.convert(path, tmp_path / "again.safetensors")
    with sluice.open(tmp_path / "again.safetensors") as again:
        assert again.metadata == metadata

    other = tmp_path / "other.pt"
    torch.save({"pt": torch.arange(3.0), "format": torch.arange(3.0)}, other)
    report = sluice.diff(path, other)
    assert "format" in {*report.tied, *(each.name for each in report.differences)}
