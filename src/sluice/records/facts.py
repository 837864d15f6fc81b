"""Files, and facts about them and about the machine, collected once before planning."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from msgspec import Struct, field

from sluice import _defaults as defaults

__all__ = [
    "REMOTE_FILESYSTEM",
    "AccessFacts",
    "DeviceFacts",
    "FileFacts",
    "FileIdentity",
    "FileRecord",
    "MachineFacts",
    "largest_access",
    "local_access",
]

#: Name of the file system of files that are not on this machine.
REMOTE_FILESYSTEM = "remote"


class AccessFacts(Struct, frozen=True, kw_only=True):
    """The requests that suit a source: a local disk, an object store, memory."""

    #: Largest request, in bytes, a multiple of 4096 and at least 1 MiB; longer ranges are divided.
    request_bytes: int
    #: Largest gap between two ranges that are read in one request, in bytes.
    gap_bytes: int
    #: Full-sized requests in flight at once that saturate the source.
    parallel_requests: int
    #: Bytes at the beginning of a file that are read first.
    first_bytes: int = defaults.HEADER_PIECE_BYTES
    #: Bytes of a read of any other part of the headers, if fewer are needed.
    header_bytes: int = defaults.HEADER_PIECE_BYTES
    #: Whether a read continues the request of the read before it, up to ``request_bytes`` in all.
    joins_reads: bool = False


def local_access() -> AccessFacts:
    """Return the access facts of local files and of memory: the defaults, as one record."""
    return _access(
        request_bytes=defaults.READ_BYTES,
        gap_bytes=defaults.COALESCE_GAP_BYTES,
        parallel_requests=defaults.WAITING_READERS,
    )


_access = cache(AccessFacts)


def largest_access(accesses: Iterable[AccessFacts]) -> AccessFacts:
    """Return the largest value of each fact: a pool of buffers and threads that serves all the sources.

    Without sources these are the facts of local files.
    """
    distinct = set(accesses) or {local_access()}
    if len(distinct) == 1:
        return distinct.pop()
    largest = {fact: max(getattr(access, fact) for access in distinct) for fact in AccessFacts.__struct_fields__}
    return AccessFacts(**largest)


class FileIdentity(Struct, frozen=True, kw_only=True):
    """Identity of the bytes of a source, which must not change between planning a load and its end.

    Local files are identified by their inode and times, remote objects by their version, memory by its size alone.
    """

    #: Size in bytes.
    nbytes: int
    #: ``st_dev`` of a local file.
    device: int = 0
    #: ``st_ino`` of a local file.
    inode: int = 0
    #: Last change of the contents, in nanoseconds since the epoch.
    mtime_ns: int = 0
    #: Last change of the inode, in nanoseconds since the epoch: catches rewrites that restore ``mtime``.
    ctime_ns: int = 0
    #: ETag, version id or generation of a remote object; None for local files and memory.
    version: str | None = None
    #: Whether ``version`` is a weak ETag or a time: different bytes may have the same.
    weak: bool = False

    @property
    def exact(self) -> bool:
        """Whether equal identities show equal bytes, even long after."""
        return not self.weak if self.version is not None else bool(self.inode)

    def describe(self) -> str:
        """Return the identity as text for error messages."""
        if self.version is not None:
            return f"{self.nbytes} bytes, version {self.version!r}"
        if not self.inode:
            return f"{self.nbytes} bytes"
        return (
            f"{self.nbytes} bytes, inode {self.device}:{self.inode}, mtime {self.mtime_ns} ns, ctime {self.ctime_ns} ns"
        )


class FileRecord(Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    #: Path that opens the file, also for messages.
    path: str
    #: Identity of the file when it was indexed.
    identity: FileIdentity

    def describe(self) -> str:
        """Return text that is equal only for equal bytes, if the identity is exact.

        Two objects may have one version: servers make ETags of sizes and times.
        """
        address = "" if self.identity.version is None else f"{self.path}, "
        return address + self.identity.describe()


class FileFacts(Struct, frozen=True, kw_only=True):
    """Facts about one file."""

    #: Name of the file system: ``"ext4"``, ``"nfs4"``, ``"tmpfs"``; empty when unknown, ``REMOTE_FILESYSTEM`` if the
    #: file is not on this machine.
    filesystem: str
    #: Whether opening it for direct I/O is worth trying: a local disk whose file system accepts it.
    direct_io: bool
    #: Bytes between two page-cache probes.
    probe_step_bytes: int
    #: Cached share of each step, from 0 to 1; only 0 or 1 where the kernel does not count pages. Empty if unknown.
    cached: tuple[float, ...] = ()
    #: Request size, coalescing gap and parallelism of its source.
    access: AccessFacts = field(default_factory=local_access)


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """Facts about one accelerator."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Free bytes on the device; None if unknown.
    free_bytes: int | None = None
    #: Bytes that torch's allocator has cached on it but does not use.
    cached_bytes: int = 0


class MachineFacts(Struct, frozen=True, kw_only=True):
    """Facts about the machine, the files and the accelerators of a load."""

    #: Processors that this process may use.
    cores: int
    #: Host memory available to this process without swapping, in bytes.
    memory_available_bytes: int
    #: Host memory left to this process under the tightest control group, in bytes; None if there is no limit.
    memory_limit_bytes: int | None
    #: Whether anonymous memory can be backed by 2 MiB pages.
    huge_pages: bool
    #: Facts of each file, in the order of ``LoadPlan.files``.
    files: tuple[FileFacts, ...]
    #: Facts of each accelerator that the load uses.
    devices: tuple[DeviceFacts, ...] = ()
    #: Whether this process may start threads: not under a limit on virtual memory.
    threads: bool = True
    #: Processes of the host that load at the same time; available memory and memory limit are divided by them.
    host_ranks: int = 1

    @property
    def access(self) -> AccessFacts:
        """The largest value of each access fact of the files."""
        return largest_access(file.access for file in self.files)

    @property
    def host_headroom(self) -> tuple[int, str]:
        """Bytes by which host memory may grow if the caller set no limit, and the origin of this figure."""
        share = f", for each of {self.host_ranks} ranks" if self.host_ranks > 1 else ""
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < self.memory_available_bytes:
            return self.memory_limit_bytes, f"left in the control group{share}"
        return self.memory_available_bytes, f"free memory{share}"
