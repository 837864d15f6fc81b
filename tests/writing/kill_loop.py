"""Kills saves at random moments and looks at what they leave. Run as a script: START KILLS DIRECTORY MODE...

START is ``over`` (each save replaces the one before it) or ``new`` (each finds nothing, or what a killed one left).
One process imports torch and forks a child for each save, because importing it anew would take most of the time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import sluice
from sluice import _options as options
from sluice.writing import _direct

_TENSORS, _ROWS = 6, 500


class Mode(NamedTuple):
    """One way to save."""

    name: str
    format: Literal["safetensors", "torch", "huggingface", "per-parameter"]
    shard_bytes: int | None
    #: Files of a whole checkpoint.
    files: int


MODES = {
    "torch": Mode("model.pth", "torch", None, 1),
    "safetensors": Mode("model.safetensors", "safetensors", None, 1),
    "huggingface": Mode("model", "huggingface", None, 1),
    "sharded": Mode("model", "huggingface", 150_000, _TENSORS + 1),
    "per-parameter": Mode("model", "per-parameter", None, _TENSORS),
}


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((_ROWS, 50), float(number * 10 + i)) for i in range(_TENSORS)}


def save(mode: Mode, path: Path, number: int, *, overwrite: bool) -> None:
    sluice.save(state(number), path, format=mode.format, overwrite=overwrite, max_shard_size=mode.shard_bytes)


def generation(path: Path) -> int | None:
    """Return which save the file is of, all of it; None when there is no checkpoint."""
    if not path.exists() or (path.is_dir() and not any(not name.startswith(".") for name in os.listdir(path))):
        return None
    try:
        loaded = sluice.load_state_dict(path)
    except sluice.IncompleteCheckpointError:  # some shards have their names, and the index has not
        return None
    assert len(loaded) == _TENSORS, sorted(loaded)
    values = {int(tensor.unique().item()) for tensor in loaded.values()}
    numbers = {value // 10 for value in values}
    assert len(numbers) == 1, f"a mix of saves: {sorted(values)}"
    return numbers.pop()


def clear(path: Path) -> None:
    """Remove a checkpoint, and nothing that is hidden beside it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def kill_one(mode: Mode, path: Path, number: int, seconds: float, *, overwrite: bool) -> bool:
    """Start a save, kill it after some time and return whether that came before its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if number % 2:
            _write_directly()
        os.write(writer, b"!")
        save(mode, path, number, overwrite=overwrite)
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed by itself"
    return os.WIFSIGNALED(status)


def _write_directly() -> None:
    """Write around the page cache, where the file system lets this process, as a large file is written."""
    options.DIRECT_FILE_BYTES, options.DIRECT_WRITE_BYTES, options.WRITE_BYTES = 1, 4096, 30_000
    vars(_direct)["takes_direct_io"] = lambda _: True


def main(mode: Mode, kills: int, directory: Path, *, new: bool) -> tuple[int, int]:
    """Return how many saves were killed, and how many of these had taken effect."""
    torch.set_num_threads(1)
    path = directory / mode.name
    chance = random.Random(kills)
    save(mode, path, 1, overwrite=True)  # the first one also imports
    current: int | None = 1
    if new:
        clear(path)
        current = None
    died = effective = 0
    number, longest = 1, 0.005
    while died < kills:
        number += 1
        was_killed = kill_one(mode, path, number, chance.uniform(0, longest), overwrite=not new)
        longest *= 1.1 if was_killed else 0.8  # about two in three are killed, at whatever speed the machine has
        died += was_killed
        found = generation(path)
        assert found in {current, number}, f"neither old nor new: {found}, not {current} or {number}"
        assert found == number or was_killed, "the save had ended, and its file is not there"
        effective += was_killed and found == number
        current = found
        if new and found is not None:
            clear(path)
            current = None
    save(mode, path, number + 1, overwrite=not new)
    hidden = [each.name for each in directory.rglob("*") if "sluice" in each.name]
    assert not hidden, hidden
    files = [each.name for each in directory.rglob("*") if each.is_file()]
    assert len(files) == mode.files, files
    return died, effective


if __name__ == "__main__":
    for name in sys.argv[4:]:
        place = Path(sys.argv[3]) / name
        place.mkdir()
        killed, effective = main(MODES[name], int(sys.argv[2]), place, new=sys.argv[1] == "new")
        print(f"{name}, {sys.argv[1]}: {killed} kills, {effective} of them after the save had taken effect", flush=True)
