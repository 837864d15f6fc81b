"""What was asked of the machine before planning."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceFacts", "FileFacts", "MachineFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What was asked of the file system about one file."""

    #: Name of the file system: ``"ext4"``, ``"nfs4"``, ``"tmpfs"``; empty when unknown.
    filesystem: str
    #: Whether opening it for direct I/O is worth trying: a local disk whose file system accepts it.
    direct_io: bool
    #: Bytes between two page-cache probes.
    probe_step_bytes: int
    #: A flag for each probe: whether the file was cached about ``i * probe_step_bytes``; empty when nobody tells.
    cached: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What was asked of one accelerator."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Bytes that the device has free for anybody; None when it does not say.
    free_bytes: int | None = None
    #: Bytes that torch's allocator holds of it without using them.
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was asked of the machine before planning."""

    #: Processors that this process may use.
    cores: int
    #: Host memory that can be had without swapping, in bytes.
    memory_available_bytes: int
    #: Host memory left under the tightest control group, in bytes; None without a limit.
    memory_limit_bytes: int | None
    #: Whether anonymous memory can be backed by 2 MiB pages.
    huge_pages: bool
    #: Facts of each file, in the order of ``LoadPlan.files``.
    files: tuple[FileFacts, ...]
    #: Facts of each accelerator that the load uses.
    devices: tuple[DeviceFacts, ...] = ()
    #: Virtual memory that the process may still map, in bytes (RLIMIT_AS); None without a limit.
    address_space_bytes: int | None = None

    @property
    def host_headroom(self) -> tuple[int, str]:
        """Bytes by which host memory may grow if the caller set no limit, and where that number comes from."""
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < self.memory_available_bytes:
            return self.memory_limit_bytes, "left in the control group"
        return self.memory_available_bytes, "free memory"
