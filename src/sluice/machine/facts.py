"""Facts about the machine and its files that planning needs, collected once and frozen.

Nothing here waits for the disk: the page cache is probed, and file systems and control groups are read from ``/proc``
and ``/sys``, which takes less than 0.2 ms. What cannot change during a process is asked once: whether the kernel has
huge pages, and the file system of a device. A fact that the platform does not provide is recorded as unknown, and
planning assumes the safe case.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice._threads import spare_threads
from sluice.machine.cgroups import cgroup_headroom
from sluice.machine.filesystems import filesystem_type
from sluice.machine.processes import read_system_file
from sluice.records import REMOTE_FILESYSTEM, DeviceFacts, FileFacts, MachineFacts
from sluice.records.geometry import round_up
from sluice.sources.local import LocalFile
from sluice.sources.pages import cached_bytes, resident_bytes
from sluice.sources.protocol import DirectIOUnavailable, MappableSource, Source
from sluice.sources.ranges import MemoryFile

__all__ = ["file_facts", "machine_facts", "mappable", "probe_cache", "takes_direct_io"]

#: Local file systems on which direct reads and writes were measured to be at least as fast as buffered ones. Network
#: and FUSE file systems, and those that merely accept the flag, are excluded.
_DIRECT_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "erofs", "overlay"})

#: File systems that keep every byte in memory. Counting the pages of a file there takes a tenth of the load's time.
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})

#: Memory that programs can take without swapping, in KiB.
_AVAILABLE = re.compile(rb"^MemAvailable: +(\d+)", re.MULTILINE)

#: When control groups are asked again for a limit.
_unlimited_until = 0.0

#: Facts for unread and for small files, and for non-local sources: assume buffered reads.
_UNKNOWN_FILE = FileFacts(filesystem="", direct_io=False, probe_step_bytes=defaults.PROBE_STEP_BYTES)


def machine_facts(
    sources: Sequence[Source],
    devices: tuple[DeviceFacts, ...] = (),
    *,
    host_ranks: int = 1,
    read: Collection[int] | None = None,
) -> MachineFacts:
    """Return the facts of this machine and of the files of ``sources``, in their order.

    Args:
        sources: The files.
        devices: Facts of the accelerators; collecting them needs torch.
        host_ranks: Processes of the host that load at the same time and share its memory.
        read: Positions of the files that will be read, such as few shards for a slice; None for all of them.
    """
    headroom = None if time.monotonic() < _unlimited_until else _headroom()
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_available_bytes=_available_bytes() // host_ranks,
        memory_limit_bytes=None if headroom is None else headroom // host_ranks,
        huge_pages=_huge_pages(),
        files=tuple(file_facts(one) if read is None or i in read else _UNKNOWN_FILE for i, one in enumerate(sources)),
        devices=devices,
        threads=spare_threads(1) > 0,
        host_ranks=host_ranks,
    )


def file_facts(source: Source) -> FileFacts:
    """Return the facts of one file; for sources other than local files and memory most are unknown."""
    if isinstance(source, MemoryFile):
        return replace(_UNKNOWN_FILE, filesystem="memory", access=source.access)
    if not isinstance(source, LocalFile):
        # Sources of other packages may forward to a local file, which has an inode.
        filesystem = "" if source.identity.inode else REMOTE_FILESYSTEM
        return replace(_UNKNOWN_FILE, filesystem=filesystem, access=source.access)
    nbytes = source.identity.nbytes
    large = nbytes >= defaults.DIRECT_FILE_BYTES
    if nbytes <= defaults.SERIAL_BYTES and not large:  # read through the page cache, wherever it is
        return _UNKNOWN_FILE
    filesystem = filesystem_type(source.local_path)
    step = max(defaults.PROBE_STEP_BYTES, round_up(-(-nbytes // defaults.PROBES_PER_FILE), defaults.BLOCK_BYTES))
    return FileFacts(
        filesystem=filesystem,
        direct_io=large and filesystem in _DIRECT_FILESYSTEMS and _opens_direct(source),
        probe_step_bytes=step,
        cached=_cached(source, filesystem, range(0, nbytes, step)),
        access=source.access,
    )


def _cached(source: LocalFile, filesystem: str, offsets: range) -> tuple[float, ...]:
    if filesystem in _MEMORY_FILESYSTEMS:
        return (1.0,) * len(offsets)
    with source.lend() as descriptor:
        return probe_cache(descriptor, offsets)


def probe_cache(descriptor: int, offsets: range) -> tuple[float, ...]:
    """Return the cached share of each part of a file, from 0 to 1, without waiting for the disk.

    The kernel counts the pages of a range if it can (``sources/pages.py``). Otherwise single bytes are read
    without waiting (``RWF_NOWAIT``). Such a probe fails if its page is not cached, but the kernel starts to read that
    page nevertheless; so its offset is random, and the next load does not probe the same page.

    Args:
        descriptor: The open file.
        offsets: First byte of each part; ``offsets.stop`` is the size of the file.

    Returns:
        One share per part, 0 or 1 if the kernel does not count pages; empty if it does not support probing.
    """
    count = _counter(descriptor) if offsets else None
    if count is None:
        return _probe_bytes(descriptor, offsets)
    shares = []
    for offset in offsets:
        nbytes = min(defaults.PROBE_BYTES, offsets.step, offsets.stop - offset)
        shares.append(min(1.0, count(descriptor, offset, nbytes) / nbytes))
    return tuple(shares)


def _counter(descriptor: int) -> Callable[[int, int, int], int] | None:
    """Return a function that counts a page that was just read and so is certainly cached; None if there is none."""
    if not hasattr(os, "pread"):  # Windows
        return None
    try:
        os.pread(descriptor, 1, 0)
    except OSError:  # a failing disk fails again when the plan reads
        return None
    return next((count for count in (cached_bytes, resident_bytes) if count(descriptor, 0, 1) > 0), None)


def _probe_bytes(descriptor: int, offsets: range) -> tuple[float, ...]:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return ()
    found = []
    one = bytearray(1)
    for offset in offsets:
        anywhere = offset + int.from_bytes(os.urandom(8)) % min(offsets.step, offsets.stop - offset)
        try:
            found.append(float(os.preadv(descriptor, [one], anywhere, nowait) == 1))
        except BlockingIOError:
            found.append(0.0)
        except OSError:  # unsupported here; a failing disk fails again when the plan reads
            return ()
    return tuple(found)


def takes_direct_io(path: str) -> bool:
    """Return whether direct reads and writes at a path are worth trying: it is on a suitable local file system."""
    return filesystem_type(path) in _DIRECT_FILESYSTEMS


def mappable(source: Source) -> bool:
    """Return whether the system can map a source, by mapping its first byte without touching it."""
    if not isinstance(source, MappableSource):
        return False
    try:
        source.map(0, 1)
    except ReadError:
        return False
    return True


def _headroom() -> int | None:
    """Return what control groups leave; that they have no limit holds for ``UNLIMITED_SECONDS``."""
    global _unlimited_until  # noqa: PLW0603  of the process, as its control groups are
    headroom = cgroup_headroom()
    if headroom is None:
        _unlimited_until = time.monotonic() + defaults.UNLIMITED_SECONDS
    return headroom


def _available_bytes() -> int:
    found = _AVAILABLE.search(read_system_file("/proc/meminfo") or b"")
    if found:
        return int(found[1]) << 10
    import psutil  # here, not above: only systems without /proc need it

    return int(psutil.virtual_memory().available)


@cache
def _huge_pages() -> bool:
    modes = read_system_file("/sys/kernel/mm/transparent_hugepage/enabled")
    return modes is not None and b"[never]" not in modes


def _opens_direct(source: LocalFile) -> bool:
    try:
        with source.lend(direct=True):
            return True
    except DirectIOUnavailable:
        return False
