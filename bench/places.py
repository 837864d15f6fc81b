"""Places that a checkpoint is read from: file systems, slow storage, control groups.

Each is undone when its block ends, also by Ctrl-C and SIGTERM. Mounts are made in a mount namespace of this process, so
that they vanish with it, however it ends; after SIGKILL a loop device can remain, which ``losetup --detach`` frees.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench._slow_files import slow_files

__all__ = ["PLACES", "Place", "Spot", "Unavailable", "own_mounts"]

#: Writes the files into a directory.
Fill = Callable[[Path], None]

#: Size of an image in multiples of what is written to it; the image is sparse.
_IMAGE_TIMES, _IMAGE_BYTES = 2, 512 << 20

_SLOW_BYTES_PER_SECOND = 400e6
_SLOW_LATENCY_SECONDS = 0.002

_CLONE_NEWNS = 0x00020000


class Unavailable(Exception):  # noqa: N818  (an outcome, shown as the reason why a place was skipped)
    """This machine cannot set up a place; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A place that was set up."""

    #: Directory with the files.
    folder: Path


#: Sets a place up: from a directory for its images and mount points, the function that writes the files, and the bytes
#: that it writes.
SetUp = Callable[[Path, Fill, int], AbstractContextManager[Spot]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place, and how a checkpoint is loaded from it."""

    #: Sets it up.
    set_up: SetUp
    #: Processes that load one file at once.
    processes: int = 1
    #: Whether the files can be dropped from memory.
    has_disk: bool = True
    #: Whether the loading process is in a control group with memory for what the contract allows and no more.
    limited: bool = False
    #: Whether a process in the same group reads another file through the page cache meanwhile.
    rival: bool = False


def own_mounts() -> None:
    """Give this process a mount namespace of its own; without permission, do nothing."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) == 0:
        _run("mount", "--make-rprivate", "/")


def _run(*command: str) -> str:
    """Run a program of the system and return what it prints. Ctrl-C does not reach it."""
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise Unavailable(f"{command[0]}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return done.stdout.strip()


@contextmanager
def _mounted(point: Path, *options: str) -> Iterator[Path]:
    if os.geteuid():
        raise Unavailable("mounting needs root")
    point.mkdir()
    _run("mount", *options, str(point))
    try:
        yield point
    finally:
        _unmount(point)


def _unmount(point: Path) -> None:
    try:
        _run("umount", str(point))
    except Unavailable:  # in use, for example by a process that was killed a moment ago
        _run("umount", "--lazy", str(point))


@contextmanager
def _loop(image: Path, *, sector_bytes: int = 512) -> Iterator[Path]:
    """Attach an image to a loop device that reads it directly, so that it is cached once and not twice."""
    if os.geteuid():
        raise Unavailable("loop devices need root")
    device = _run(
        "losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector_bytes}", "--nooverlap", str(image)
    )
    try:
        yield Path(device)
    finally:
        _run("losetup", "--detach", device)  # if it is still in use, the kernel does so later


def _image(work: Path, nbytes: int) -> Path:
    image = work / "image"
    with image.open("wb") as stream:
        stream.truncate(_IMAGE_TIMES * nbytes + _IMAGE_BYTES)
    return image


@contextmanager
def _disk(work: Path, fill: Fill, _: int) -> Iterator[Spot]:
    fill(work)
    yield Spot(folder=work)


@contextmanager
def _tmpfs(work: Path, fill: Fill, nbytes: int) -> Iterator[Spot]:
    size = f"size={_IMAGE_TIMES * nbytes + _IMAGE_BYTES}"
    with _mounted(work / "memory", "-t", "tmpfs", "-o", size, "tmpfs") as folder:
        fill(folder)
        yield Spot(folder=folder)


def _on_loop(make: Sequence[str], *, options: str = "defaults", sector_bytes: int = 512) -> SetUp:
    """Return the set-up of a file system on a loop device.

    Args:
        make: Command that makes it, without the device.
        options: Options of the mount.
        sector_bytes: Logical sector of the device, in bytes.
    """

    @contextmanager
    def set_up(work: Path, fill: Fill, nbytes: int) -> Iterator[Spot]:
        with _loop(_image(work, nbytes), sector_bytes=sector_bytes) as device:
            _run(*make, str(device))
            with _mounted(work / "disk", "-o", options, str(device)) as folder:
                fill(folder)
                yield Spot(folder=folder)

    return set_up


def _read_only(*make: str, name: str) -> SetUp:
    """Return the set-up of a file system that is made as a whole, such as those of containers and live systems.

    Args:
        make: Command, with the words ``SOURCE`` and ``IMAGE``.
        name: Its name for ``mount``.
    """

    @contextmanager
    def set_up(work: Path, fill: Fill, _: int) -> Iterator[Spot]:
        source, image = work / "source", work / "image"
        source.mkdir()
        fill(source)
        paths = {"SOURCE": str(source), "IMAGE": str(image)}
        _run(*(paths.get(word, word) for word in make))
        shutil.rmtree(source)
        with _loop(image) as device, _mounted(work / "disk", "-t", name, "-o", "ro", str(device)) as folder:
            yield Spot(folder=folder)

    return set_up


@contextmanager
def _overlay(work: Path, fill: Fill, _: int) -> Iterator[Spot]:
    """The files are in the lower layer, as those of a container's image."""
    for name in ("lower", "upper", "scratch"):
        (work / name).mkdir()
    fill(work / "lower")
    options = f"lowerdir={work}/lower,upperdir={work}/upper,workdir={work}/scratch"
    with _mounted(work / "merged", "-t", "overlay", "-o", options, "overlay") as folder:
        yield Spot(folder=folder)


@contextmanager
def _overlay_in_memory(work: Path, fill: Fill, nbytes: int) -> Iterator[Spot]:
    """The files are in the upper layer, on tmpfs."""
    with _tmpfs(work, lambda _: None, nbytes) as memory:
        folder = memory.folder / "layers"
        folder.mkdir()
        with _overlay(folder, lambda _: None, nbytes) as merged:
            fill(merged.folder)
            yield merged


@contextmanager
def _network(work: Path, fill: Fill, _: int) -> Iterator[Spot]:
    source, mount = work / "source", work / "slow"
    source.mkdir()
    mount.mkdir()
    fill(source)
    slow = slow_files(source, mount, latency_seconds=_SLOW_LATENCY_SECONDS, bytes_per_second=_SLOW_BYTES_PER_SECOND)
    with ExitStack() as stack:
        try:
            stack.enter_context(slow)
        except OSError as error:
            raise Unavailable(f"FUSE: {error.strerror}") from error
        yield Spot(folder=mount)


#: Every place, by its name in the table.
PLACES = {
    "this disk": Place(set_up=_disk),
    "tmpfs": Place(set_up=_tmpfs, has_disk=False),
    "ext4": Place(set_up=_on_loop(("mkfs.ext4", "-q"))),
    "ext4, sectors of 4 KiB": Place(set_up=_on_loop(("mkfs.ext4", "-q"), sector_bytes=4096)),
    "XFS": Place(set_up=_on_loop(("mkfs.xfs", "-q"))),
    "btrfs": Place(set_up=_on_loop(("mkfs.btrfs", "-q"))),
    "btrfs, zstd": Place(set_up=_on_loop(("mkfs.btrfs", "-q"), options="compress-force=zstd:1")),
    "btrfs, no checksums": Place(set_up=_on_loop(("mkfs.btrfs", "-q"), options="nodatasum")),
    "squashfs, lz4": Place(
        set_up=_read_only("mksquashfs", "SOURCE", "IMAGE", "-quiet", "-comp", "lz4", name="squashfs")
    ),
    "erofs": Place(set_up=_read_only("mkfs.erofs", "--quiet", "IMAGE", "SOURCE", name="erofs")),
    "overlay": Place(set_up=_overlay),
    "overlay on tmpfs": Place(set_up=_overlay_in_memory, has_disk=False),
    "FUSE, 2 ms, 400 MB/s": Place(set_up=_network),
    "2 processes": Place(set_up=_disk, processes=2),
    "4 processes": Place(set_up=_disk, processes=4),
    "memory of the contract": Place(set_up=_disk, limited=True),
    "the same, page cache in use": Place(set_up=_disk, limited=True, rival=True),
}
