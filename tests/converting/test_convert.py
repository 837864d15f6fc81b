"""Destinations that would damage the source of a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice import SaveError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.convert import check_destination
from support.hostile_archives import torch_archive


def parameters(directory: Path) -> OpenCheckpoint:
    directory.mkdir()
    for name in ("a", "b"):
        torch.save(torch.ones(1), directory / f"{name}.pt")
    return OpenCheckpoint.open(directory)


@pytest.mark.parametrize(
    ("destination", "chosen", "problem"),
    [
        ("source/a.pt", "torch", "one of the source files"),
        ("source", "per-parameter", "contains source files"),
        ("source", "huggingface", "inside the source directory"),
        ("source/new", "huggingface", "inside the source directory"),
        ("source/new.pt", "torch", "inside the source directory"),
        ("alias/new.pt", "torch", "inside the source directory"),
    ],
)
def test_writing_into_the_source_is_refused(tmp_path: Path, destination: str, chosen: str, problem: str) -> None:
    checkpoint = parameters(tmp_path / "source")
    (tmp_path / "alias").symlink_to(tmp_path / "source")
    with pytest.raises(SaveError, match=problem):
        check_destination(checkpoint, tmp_path / destination, chosen)
    check_destination(checkpoint, tmp_path / "source2", chosen)
    checkpoint.close()


def test_a_file_may_replace_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(torch_archive({}, {}))
    checkpoint = OpenCheckpoint.open(path)
    check_destination(checkpoint, path, "torch")
    check_destination(checkpoint, path, "safetensors")
    checkpoint.close()
