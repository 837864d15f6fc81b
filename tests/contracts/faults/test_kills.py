"""SIGKILL at any moment of a save or a conversion leaves the old or the new checkpoint, and no lasting leftovers."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from support import fresh_process
from support.system_calls import SystemCalls, force_direct_writes, generation

pytestmark = pytest.mark.usefixtures("fresh_processes")

_TENSORS = 6

#: Files of the forms that are one file; the others are directories.
_NAMES = {"torch": "model.pth", "safetensors": "model.safetensors"}


def state(number: int, rows: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((rows, 50), float(number)) for i in range(_TENSORS)}


class Job(NamedTuple):
    """A save or conversion to be killed."""

    verb: str
    #: A format of ``save``, or ``sharded``: a Hugging Face directory with a shard for each tensor.
    mode: str
    path: Path
    overwrite: bool
    #: Rows of each tensor.
    rows: int

    def prepare(self, number: int) -> Callable[[], object]:
        """Return a function that writes the checkpoint of this number."""
        how: dict[str, Any] = {
            "format": "huggingface" if self.mode == "sharded" else self.mode,
            "overwrite": self.overwrite,
            "max_shard_size": self.rows * 300 if self.mode == "sharded" else None,  # a tensor has 200 bytes in a row
        }
        if self.verb == "save":
            return lambda: sluice.save(state(number, self.rows), self.path, **how)
        source = self.path.parent.parent / "source.pt"
        torch.save(state(number, self.rows), source)
        return lambda: sluice.convert(source, self.path, **how)

    def clear(self) -> None:
        """Remove the checkpoint, and no hidden file next to it."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def check_clean(self) -> None:
        """Check that the directory has the files of a whole checkpoint and no others."""
        files = [each.name for each in self.path.parent.rglob("*") if each.is_file()]
        hidden = [each.name for each in self.path.parent.rglob("*") if "sluice" in each.name]
        assert not hidden, hidden
        assert len(files) == (_TENSORS + 1 if self.mode == "sharded" else 1), files


def forked(write: Callable[[], object], *, seconds: float | None, directly: bool = False) -> bool:
    """Write in a child, kill it after some time, and return whether it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if directly:
            force_direct_writes(pytest.MonkeyPatch())
            defaults.WRITE_BYTES = 30_000
        os.write(writer, b"!")
        write()
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
    return os.WIFSIGNALED(status)


def at_random_moments(job: Job, kills: int) -> tuple[int, int]:
    """Return the number of killed saves, and how many of these had taken effect."""
    chance = random.Random(kills)
    current = None if not job.overwrite else 1
    died = effective = 0
    number, longest = 1, 0.005
    while died < kills:
        number += 1
        was_killed = forked(job.prepare(number), seconds=chance.uniform(0, longest), directly=number % 2 == 1)
        longest *= 1.1 if was_killed else 0.8  # about two in three are killed, on slow and fast machines alike
        died += was_killed
        found = generation(job.path, state(0, 1))
        assert found in {current, number}, f"neither old nor new: {found}, not {current} or {number}"
        assert found == number or was_killed, "it had ended, and its file is not there"
        effective += was_killed and found == number
        current = found
        if not job.overwrite and found is not None:
            job.clear()
            current = None
    job.prepare(number + 1)()
    job.check_clean()
    return died, effective


def before_every_call(job: Job) -> tuple[int, int]:
    """Return the number of saves killed, each before a different system call, and how many had taken effect."""
    died = effective = 0
    old = 1 if job.overwrite else None
    for number in itertools.cycle(range(2, 12, 2)):  # few, so that cached contents are not read again
        calls = SystemCalls(died + 1, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        was_killed = forked(calls.watched()(job.prepare(number)), seconds=None)
        found = generation(job.path, state(0, 1))
        assert found in {old, number}, f"neither old nor new before call {died + 1}: {found}, not {old} or {number}"
        if not was_killed:
            assert found == number, "it had ended, and its file is not there"
            break
        died += 1
        effective += found == number
        if not job.overwrite and found is not None:
            job.clear()
        job.prepare(number + 1)()
        assert generation(job.path, state(0, 1)) == number + 1
        job.check_clean()
        if job.overwrite:
            old = number + 1
        else:
            job.clear()
    return died, effective


def main(verb: str, start: str, kills: str, directory: str, *names: str) -> None:
    """Kill saves and conversions and check the files they leave.

    One process imports torch and forks a child for each save, because importing torch each time would take longer than
    the saves.

    Args:
        verb: ``save`` or ``convert``, from a torch file.
        start: ``over`` (each replaces the one before it) or ``new`` (each starts with an empty place or the leftovers
            of a killed one).
        kills: Number of kills at random moments, or ``every``: one kill before each system call.
        directory: Empty directory.
        names: Modes; see ``Job``.
    """
    torch.set_num_threads(1)
    for name in names:
        place = Path(directory, name)
        place.mkdir()
        path = place / _NAMES.get(name, "model")
        job = Job(verb, name, path, overwrite=start == "over", rows=4 if kills == "every" else 500)
        job.prepare(1)()  # the first one also imports
        if not job.overwrite:
            job.clear()
        died, effective = before_every_call(job) if kills == "every" else at_random_moments(job, int(kills))
        print(f"{verb} {name}, {start}: {died} kills, {effective} of them after it had taken effect", flush=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory, if possible: kills need many saves, and each would wait for the disk's sync."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


FILES = ("torch", "safetensors")
DIRECTORIES = ("huggingface", "sharded")
EVERY = FILES + DIRECTORIES


def run(verb: str, start: str, kills: str, place: Path, modes: tuple[str, ...]) -> list[int]:
    """Return the number of killed saves per mode."""
    code = "import sys; from contracts.faults.test_kills import main; main(*sys.argv[1:])"
    done = fresh_process.run(code, verb, start, kills, place, *modes)
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
