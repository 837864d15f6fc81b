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
    ("verb", "kills", "modes"),
    [
        pytest.param("save", 25, FILES, id="save-25-files"),
        pytest.param("save", 25, DIRECTORIES, id="save-25-directories"),
        *(
            pytest.param(verb, 1000, (mode,), marks=pytest.mark.long, id=f"{verb}-1000-{mode}")
            for verb in ("save", "convert")
            for mode in EVERY
        ),
    ],
)
@pytest.mark.parametrize("start", ["over", "new"])
def test_a_kill_at_a_random_moment(place: Path, start: str, verb: str, kills: int, modes: tuple[str, ...]) -> None:
    assert run(verb, start, str(kills), place, modes) == [kills] * len(modes)


@pytest.mark.parametrize(("start", "kills", "modes"), [("over", 25, FILES), ("new", 25, DIRECTORIES)])
def test_a_kill_at_a_random_moment_of_a_conversion(place: Path, start: str, kills: int, modes: tuple[str, ...]) -> None:
    assert sum(run("convert", start, str(kills), place, modes)) >= 50


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
