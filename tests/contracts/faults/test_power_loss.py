"""Loss of power at any moment: unsynced changes may be lost, and the checkpoint is the old or the new one.

The changes of a save to names and contents are recorded. For each moment, and each subset of the changes of names that
no sync has made durable, the test builds the directory that the disk may hold. Unsynced content is garbage there.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import sluice
from support.system_calls import generation

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the names of open files come from /proc")

#: Maximum number of subsets to try per moment.
_CHOICES = 64


#: Atomic changes of names by one system call: ``(directory, name, file)``; None as file removes the name.
Change = tuple[tuple[int, str, int | None], ...]


@dataclass
class Disk:
    """Files and directories by numbers of our own, because the system reuses inode numbers."""

    root: Path
    numbers: dict[int, int] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Return the current state, which is durable."""
        disk = cls(root)
        disk.add(root)
        for path in sorted(root.rglob("*")):
            number = disk.number(path) if path.lstat().st_ino in disk.numbers else disk.add(path)
            disk.names[disk.number(path.parent)][path.name] = number
        return disk

    def add(self, path: Path) -> int:
        """Return the new number of a file or directory."""
        number = self.numbers[os.lstat(path).st_ino] = self.count
        self.count += 1
        if path.is_dir():
            self.names[number] = {}
        else:
            self.contents[number] = path.read_bytes()
        return number

    def number(self, path: str | Path) -> int:
        return self.numbers[os.lstat(path).st_ino]

    def build(self, changes: list[Change], contents: dict[int, bytes], target: Path) -> None:
        """Write the state after these changes."""
        names = {number: dict(each) for number, each in self.names.items()}
        for change in changes:
            for directory, name, number in change:
                if number is None:
                    names.setdefault(directory, {}).pop(name, None)
                else:
                    names.setdefault(directory, {})[name] = number

        def write(number: int, path: Path) -> None:
            if number in self.names:
                path.mkdir()
                for name, child in names.get(number, {}).items():
                    write(child, path / name)
            else:
                path.write_bytes(contents.get(number, b"garbage" * 9))

        write(0, target)


class Recording:
    """Recorded changes of a save to the disk below one directory.

    Attributes:
        moments: After each call: the changes so far, the durable ones among them, and the durable content.
    """

    def __init__(self, root: Path) -> None:
        self.disk = Disk.of(root)
        self.moments: list[tuple[list[Change], set[int], dict[int, bytes]]] = []
        self._changes: list[Change] = []
        self._durable: set[int] = set()
        self._contents = dict(self.disk.contents)

    def _moment(self) -> None:
        self.moments.append((list(self._changes), set(self._durable), dict(self._contents)))

    def _change(self, *entries: tuple[str, int | None]) -> None:
        places = ((self.disk.number(os.path.dirname(path)), os.path.basename(path), to) for path, to in entries)
        self._changes.append(tuple(places))
        self._moment()

    def made(self, path: str) -> None:
        self._change((path, self.disk.add(Path(path))))

    def renamed(self, old: str, new: str) -> None:
        self._change((old, None), (new, self.disk.number(new)))

    def removed(self, path: str) -> None:
        self._change((path, None))

    def synced(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        number = self.disk.number(path)
        if os.path.isdir(path):
            for position, change in enumerate(self._changes):
                if all(directory == number for directory, _, _ in change):
                    self._durable.add(position)
        else:
            self._contents[number] = Path(path).read_bytes()
        self._moment()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the calls of the block."""
        after = {
            "mkdir": self.made,
            "replace": self.renamed,
            "rename": self.renamed,
            "link": lambda old, new: self._change((new, self.disk.number(old))),
            "unlink": self.removed,
            "rmdir": self.removed,
            "fsync": self.synced,
        }
        real_open = os.open

        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            descriptor = real_open(path, flags, *args, **options)
            if flags & os.O_CREAT:
                self.made(os.fspath(path))
            return descriptor

        with ExitStack() as stack:
            stack.enter_context(mock.patch("os.open", opened))
            for name, tell in after.items():
                stack.enter_context(mock.patch(f"os.{name}", _then(getattr(os, name), tell)))
            yield


def _then(real: Any, tell: Any) -> Any:
    def call(*args: Any, **options: Any) -> None:
        real(*args, **options)
        tell(*(os.fspath(arg) if isinstance(arg, Path) else arg for arg in args))

    return call


def choices(changes: list[Change], durable: set[int], chance: random.Random) -> Iterator[list[Change]]:
    """Yield possible states of the disk: all durable changes, and any subset of the others."""
    others = [position for position in range(len(changes)) if position not in durable]
    every: Any = itertools.product((False, True), repeat=len(others))
    if 2 ** len(others) > _CHOICES:
        some = [tuple(chance.random() < 0.5 for _ in others) for _ in range(_CHOICES)]
        every = [*some, (False,) * len(others), (True,) * len(others)]
    for chosen in every:
        kept = durable | {position for position, keep in zip(others, chosen, strict=True) if keep}
        yield [change for position, change in enumerate(changes) if position in kept]


def state(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 5), float(number)) for name in "abc"}


SHARDED = {"max_shard_size": 100}
_MISSING: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("model.pth", _MISSING, {}),
        ("model.pth", {}, {}),
        ("model.safetensors", {}, {}),
        ("model", _MISSING, {}),
        ("model", {}, {}),
        ("model", _MISSING, SHARDED),
        ("model", SHARDED, SHARDED),
        ("model", {}, SHARDED),
        ("model", SHARDED, {}),
    ],
)
def test_the_checkpoint_is_old_or_new_after_a_loss_of_power(
    tmp_path: Path, name: str, before: dict[str, Any] | None, after: dict[str, Any]
) -> None:
    live = tmp_path / "live"
    live.mkdir()
    if before is not None:
        sluice.save(state(1), live / name, **before)
    recording = Recording(live)
    with recording.watched():
        sluice.save(state(2), live / name, **after, overwrite=before is not None)
    chance, seen = random.Random(0), set()
    old = None if before is None else 1
    for number, (changes, durable, contents) in enumerate(recording.moments):
        for chosen in choices(changes, durable, chance):
            key = (tuple(chosen), frozenset(contents), number == len(recording.moments) - 1)
            if key in seen:
                continue
            seen.add(key)
            target = tmp_path / "after"
            recording.disk.build(chosen, contents, target)
            found = generation(target / name, "abc")
            shutil.rmtree(target)
            assert found in {old, 2}, (number, chosen)
    assert found == 2, "the save had returned"
    assert generation(live / name, "abc") == 2
    assert len(seen) > 5
