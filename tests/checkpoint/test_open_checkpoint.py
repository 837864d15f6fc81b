"""Names of tied tensors in the metadata of a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import sluice
from sluice.checkpoint.open_checkpoint import OpenCheckpoint


def test_the_metadata_names_tied_tensors_but_the_format_of_the_file_is_not_a_tie(tmp_path: Path) -> None:
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
    assert list(converted) == ["pt", "head"]
    assert converted["pt"].untyped_storage().data_ptr() == converted["head"].untyped_storage().data_ptr()

    other = tmp_path / "other.pt"
    torch.save({"pt": torch.arange(3.0), "format": torch.arange(3.0)}, other)
    report = sluice.diff(path, other)
    assert "format" in {*report.tied, *(each.name for each in report.differences)}
