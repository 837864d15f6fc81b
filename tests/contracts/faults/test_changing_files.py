"""Files that another process writes, replaces or removes while they are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import sluice
from support.wide_tensors import module, tensors


def write(path: Path) -> None:
    torch.save(tensors(), path)
    os.utime(path, (1, 1))  # long ago: a change within one tick of the clock is not visible


def rewrite_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"x")


def replace_by_rename(path: Path) -> None:
    torch.save(tensors(2.0), path.with_name("new"))
    path.with_name("new").replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def remove(path: Path) -> None:
    path.unlink()


CHANGES = pytest.mark.parametrize(
    "change", [rewrite_in_place, replace_by_rename, truncate, append, remove], ids=lambda change: change.__name__
)


class ChangeAt:
    """Calls ``change`` at the ``at``-th progress event."""

    def __init__(self, change: Callable[[Path], None], path: Path, at: int) -> None:
        self._change, self._path, self._at = change, path, at
        self.events = 0

    def __call__(self, _: sluice.ProgressEvent) -> None:
        self.events += 1
        if self.events == self._at:
            self._change(self._path)


@CHANGES
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_a_change_at_any_point_is_noticed(
    tmp_path: Path, change: Callable[[Path], None], live: bool, dtype: torch.dtype | None
) -> None:
    path = tmp_path / "f.pth"
    for at in range(1, 50):
        write(path)
        model = module(live=live)
        progress = ChangeAt(change, path, at)
        try:
            sluice.load_into(model, path, dtype=dtype, progress=progress)
        except (sluice.SourceChangedError, sluice.PartialLoadError) as error:
            changed = error.__cause__ if isinstance(error, sluice.PartialLoadError) else error
            assert isinstance(changed, sluice.SourceChangedError)
            assert isinstance(error, sluice.PartialLoadError) == live
            assert changed.file == str(path)
            assert progress.events >= at
            assert live or all(tensor.is_meta for tensor in model.values())
        else:
            assert progress.events < at  # the load had ended before
            break
    assert at > 1


@CHANGES
def test_a_change_between_opening_and_reading(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "f.pth"
    write(path)
    with sluice.open(path) as checkpoint:
        change(path)
        with pytest.raises(sluice.SourceChangedError) as caught:
            sluice.load_state_dict(checkpoint)
        assert caught.value.file == str(path)
        with pytest.raises(sluice.SourceChangedError):
            checkpoint["w1"].read()


@pytest.mark.parametrize("which", ["1.safetensors", "2.safetensors", "3.safetensors"])
@CHANGES
def test_a_shard_that_changes_during_the_load(tmp_path: Path, change: Callable[[Path], None], which: str) -> None:
    """Change a shard at the first event: it has been read, is being read, or is read later."""
    for number, (name, tensor) in enumerate(list(tensors().items())[:3], 1):
        safetensors.torch.save_file({name: tensor}, tmp_path / f"{number}.safetensors")
        os.utime(tmp_path / f"{number}.safetensors", (1, 1))
    with pytest.raises(sluice.SourceChangedError) as caught:
        sluice.load_state_dict(tmp_path, progress=ChangeAt(change, tmp_path / which, 1))
    assert caught.value.file == str(tmp_path / which)
