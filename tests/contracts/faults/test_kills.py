"""SIGKILL at any moment of a save or a conversion leaves the old or the new checkpoint, and no lasting leftovers."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory, if possible: kills need many saves, and each would wait for the disk's sync."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


FILES = ("torch", "safetensors")
DIRECTORIES = ("huggingface", "sharded")
EVERY = FILES + DIRECTORIES


KILL = """
import sys
from pathlib import Path
from support.kill_loop import main
verb, start, kills, directory, *modes = sys.argv[1:]
main(verb, start, kills, Path(directory), modes)
"""


def run(verb: str, start: str, kills: str, place: Path, modes: tuple[str, ...]) -> list[int]:
    """Return the number of killed saves per mode."""
    done = fresh_process.run(KILL, verb, start, kills, place, *modes)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [int(count) for count in re.findall(r": (\d+) kills", done.stdout)]


@pytest.mark.parametrize(
    ("verb", "start", "kills", "modes"),
    [
        *(("save", start, 25, modes) for start in ("over", "new") for modes in (FILES, DIRECTORIES)),
        ("convert", "over", 25, FILES),
        ("convert", "new", 25, DIRECTORIES),
        *(
            pytest.param(verb, start, 1000, (mode,), marks=pytest.mark.long)
            for verb in ("save", "convert")
            for start in ("over", "new")
            for mode in EVERY
        ),
    ],
)
def test_a_kill_at_a_random_moment(place: Path, verb: str, start: str, kills: int, modes: tuple[str, ...]) -> None:
    assert run(verb, start, str(kills), place, modes) == [kills] * len(modes)


@pytest.mark.parametrize(
    ("verb", "start", "modes"),
    [
        ("save", "over", (*FILES, "sharded")),
        ("save", "new", ("huggingface",)),
        pytest.param("save", "over", ("huggingface",), marks=pytest.mark.long),
        pytest.param("save", "new", (*FILES, "sharded"), marks=pytest.mark.long),
        pytest.param("convert", "over", EVERY, marks=pytest.mark.long),
        pytest.param("convert", "new", EVERY, marks=pytest.mark.long),
    ],
)
def test_a_kill_before_every_call(place: Path, verb: str, start: str, modes: tuple[str, ...]) -> None:
    killed = run(verb, start, "every", place, modes)
    assert len(killed) == len(modes)
    assert min(killed) >= 9
