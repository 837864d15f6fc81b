"""SIGKILL at any moment of a save leaves the old file or the new one, and nothing that the next save does not clean."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory, where there is one: kills need many saves, and each would wait for the disk's sync."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


FILES = ("torch", "safetensors")
DIRECTORIES = ("huggingface", "sharded", "per-parameter")


@pytest.mark.parametrize(
    ("kills", "modes"),
    [
        pytest.param(20, FILES, id="20-files"),
        pytest.param(20, DIRECTORIES, id="20-directories"),
        *(pytest.param(1000, (mode,), marks=pytest.mark.long, id=f"1000-{mode}") for mode in FILES + DIRECTORIES),
    ],
)
@pytest.mark.parametrize("start", ["over", "new"])
def test_a_killed_save_leaves_the_old_model_or_the_new_one(
    place: Path, start: str, kills: int, modes: tuple[str, ...]
) -> None:
    script = Path(__file__).with_name("kill_loop.py")
    done = subprocess.run(
        [sys.executable, str(script), start, str(kills), str(place), *modes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{kills} kills") == len(modes)
    print(done.stdout)
