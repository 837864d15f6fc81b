"""Every system call of a save fails, in every mode: a typed error, the old checkpoint intact, nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

import sluice
from support.leaks import open_files
from support.system_calls import SystemCalls, failing, force_direct_writes, generation


class Mode(NamedTuple):
    """Destination and form of a save."""

    name: str
    format: Literal["safetensors", "torch", "huggingface"]
    shard_bytes: int | None = None
    #: Whether files are written with direct I/O, as large files are.
    direct: bool = False


MODES = [
    Mode("model.pth", "torch"),
    Mode("model.safetensors", "safetensors"),
    Mode("direct.pth", "torch", direct=True),
    Mode("direct.safetensors", "safetensors", direct=True),
    Mode("whole", "huggingface"),
    Mode("sharded", "huggingface", 60),
]

#: Calls that clean up or list leftovers: if one fails, a hidden file may stay until the next save.
TIDYING = {"unlink", "rmdir", "close", "scandir", "listdir", "open", "flock"}


def state(number: int) -> dict[str, torch.Tensor]:
    tied = torch.full((2, 5), float(number))
    small = {"a": tied, "b": torch.full((7,), float(number)), "tied": tied, "d": torch.full((3, 3), float(number)).t()}
    return {**small, "blocks": torch.full((3, 1000), float(number))}


def save(mode: Mode, path: Path, number: int, *, overwrite: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if mode.direct:
            force_direct_writes(patch)
        sluice.save(state(number), path, format=mode.format, overwrite=overwrite, max_shard_size=mode.shard_bytes)


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize(
    ("start", "error"),
    [("new", errno.ENOSPC), ("over", errno.EIO), ("link", errno.EDQUOT)],
    ids=["new", "over", "link"],
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_call_that_fails(mode: Mode, start: str, error: int) -> None:
    stopped: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        prepared, place = Path(directory, "prepared"), Path(directory, "place")
        prepared.mkdir()
        if start == "link":  # to a checkpoint in another directory
            (prepared / "elsewhere").mkdir()
            save(mode, prepared / "elsewhere" / mode.name, 1, overwrite=True)
            (prepared / mode.name).symlink_to(Path("elsewhere") / mode.name)
        elif start == "over":
            save(mode, prepared / mode.name, 1, overwrite=True)
        while not stopped or stopped[-1]:
            shutil.copytree(prepared, place, symlinks=True)
            stopped.append(one_failure(place, mode, start, len(stopped) + 1, error))
            shutil.rmtree(place)
    assert {"open", "fallocate", "pwrite", "ftruncate", "fsync", "flock"} <= set(stopped)
    assert {"replace", "link"} & set(stopped)


def one_failure(place: Path, mode: Mode, start: str, at: int, error: int) -> str:
    """Save with one failing call and return its name; empty if there were fewer calls."""
    path = place / mode.name
    before, files = names(place), open_files()
    calls = SystemCalls(at, failing(error))
    problem = ""
    try:
        with calls.watched():
            save(mode, path, 2, overwrite=start != "new")
    except sluice.SaveError as refused:
        problem = str(refused)
        assert os.strerror(error) in problem
        assert str(path) in problem or str(place) in problem
    assert open_files() == files, f"{calls.stopped} leaks a descriptor"
    old = None if start == "new" else 1
    found = generation(path, state(0))
    if not problem or "is in place" in problem:
        assert found == 2, (at, calls.stopped, problem)
    else:
        assert found == old, (at, calls.stopped, problem)
        if calls.stopped not in TIDYING:
            assert names(place) == before, (at, calls.stopped, problem)
    assert path.is_symlink() == (start == "link")
    save(mode, path, 3, overwrite=start != "new" or found is not None)
    assert generation(path, state(0)) == 3
    temporary = [name for name in names(place) if "sluice" in name]
    assert not temporary, (at, calls.stopped)
    if mode.format != "huggingface" or mode.shard_bytes is None:
        expected = before or names(place)
        assert names(place) == expected, (at, calls.stopped)
    return calls.stopped
