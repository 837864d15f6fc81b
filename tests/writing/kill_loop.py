"""Kills saves at random moments and looks at what they leave. Run as a script: MODE KILLS DIRECTORY.

One process imports torch and forks a child for each save, because importing it anew would take most of the time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import sluice

_TENSORS, _ROWS = 6, 500


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((_ROWS, 50), float(number * 10 + i)) for i in range(_TENSORS)}


def save(mode: str, path: Path, number: int) -> None:
    shards = 150_000 if mode == "sharded" else None
    kind = {"sharded": "huggingface"}.get(mode, mode)
    sluice.save(state(number), path, format=kind, overwrite=True, max_shard_size=shards)  # type: ignore[arg-type]


def generation(path: Path) -> int:
    """Return which save the file is of, all of it."""
    loaded = sluice.load_state_dict(path)
    assert len(loaded) == _TENSORS, sorted(loaded)
    values = {int(tensor.unique().item()) for tensor in loaded.values()}
    numbers = {value // 10 for value in values}
    assert len(numbers) == 1, f"a mix of saves: {sorted(values)}"
    return numbers.pop()


def main(mode: str, kills: int, directory: Path) -> None:
    torch.set_num_threads(1)
    path = directory / ("model" if mode in {"sharded", "huggingface"} else "model.bin")
    chance = random.Random(kills)
    save(mode, path, 0)  # the first one also imports
    started = time.perf_counter()
    save(mode, path, 1)
    usual = time.perf_counter() - started
    current, died = 1, 0
    while died < kills:
        number = current + 1
        child = os.fork()
        if child == 0:
            save(mode, path, number)
            os._exit(0)
        time.sleep(chance.uniform(0, 1.3 * usual))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        died += os.WIFSIGNALED(status)
        found = generation(path)
        assert found in {current, number}, f"neither old nor new: {found}, not {current} or {number}"
        assert found == number or os.WIFSIGNALED(status), "the save had ended, and its file is not there"
        current = found
    save(mode, path, current + 1)
    hidden = [each.name for each in directory.rglob("*") if each.name.endswith(".sluice-partial")]
    assert not hidden, hidden
    files = [each.name for each in directory.rglob("*") if each.is_file()]
    assert len(files) == (7 if mode == "sharded" else 1), files
    print(f"{mode}: {died} kills, {current} saves survived")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
