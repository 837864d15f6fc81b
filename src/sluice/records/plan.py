"""The plan of a load: the complete decision that the engine runs; memory and requests, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct

from sluice._public import public
from sluice._units import counted, format_bytes
from sluice.records.elements import Elements
from sluice.records.facts import REMOTE_FILESYSTEM, FileRecord, MachineFacts
from sluice.records.targets import Target

__all__ = [
    "Block",
    "BlockKind",
    "Copy",
    "DeviceMemory",
    "DevicePlan",
    "LoadPlan",
    "MappedRange",
    "Method",
    "Peaks",
    "Read",
    "RemoteReads",
    "RequestRecord",
    "Reservation",
    "Traffic",
    "requests_of",
]

#: Method of a read: ``direct`` bypasses the page cache (O_DIRECT), ``buffered`` uses it.
Method = Literal["direct", "buffered"]

#: Kind of final memory; see ``Block.kind``.
BlockKind = Literal["mapping", "arena", "mapped", "existing", "device", "empty", "file"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Growth of host memory during a load, in bytes: predicted by a plan, or measured."""

    #: Private anonymous memory.
    anon_bytes: int
    #: Pages of mapped files.
    file_bytes: int
    #: Shared memory.
    shmem_bytes: int
    #: Peak of the sum of all three, which can be less than the sum of their peaks.
    total_bytes: int


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """Growth of the memory of one accelerator during a load, in bytes: predicted and measured."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Bytes of the tensors.
    requested_bytes: int
    #: Predicted growth of the reserved bytes of torch's allocator, without cached memory.
    predicted_bytes: int
    #: Growth of torch's allocated bytes; None if unknown.
    allocated_bytes: int | None = None
    #: Growth of torch's reserved bytes; None if unknown.
    reserved_bytes: int | None = None


class Copy(Struct, frozen=True, kw_only=True, gc=False):
    """A strided copy from the bytes of a read to a target: the part of a ``Fill`` inside one read."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: First byte of element 0, counted from ``Read.offset``.
    offset: int
    #: Stored form of the elements after swaps, and computations on them.
    elements: Elements
    #: Size of each dimension, in elements or packs.
    shape: tuple[int, ...]
    #: Step of each dimension in the read, in elements or packs.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Position of element 0 in the target, in elements.
    target_start: int

    @property
    def dtype(self) -> str:
        """Dtype of the elements that were read."""
        return self.elements.dtype


class Read(Struct, frozen=True, kw_only=True, gc=False):
    """One contiguous range of one file, and the destination of its bytes."""

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte in the file.
    offset: int
    #: Bytes to read.
    nbytes: int
    #: Permitted methods in order of preference; the engine may only step down.
    methods: tuple[Method, ...]
    #: Positions of the targets that receive bytes, each once.
    targets: tuple[int, ...] = ()
    #: Position of the target that receives the bytes without staging; None for a staged read.
    into: int | None = None
    #: With ``into``: first byte in the target.
    into_offset: int = 0
    #: Without ``into``: the copies out of the staging buffer.
    copies: tuple[Copy, ...] = ()
    #: Without ``into``: bytes of each number, if all of it is big-endian and is byteswapped before the copies; or 0.
    swap_bytes: int = 0
    #: Whether it is part of the request of the read before it: bytes between them are received and dropped.
    continues: bool = False


def requests_of(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield the reads of each request: one, or several that follow each other in a remote file."""
    request: list[Read] = []
    for read in reads:
        if request and not read.continues:
            yield request
            request = []
        request.append(read)
    if request:
        yield request


class Block(Struct, frozen=True, kw_only=True, gc=False):
    """One allocation of final memory, for the target at the same position of ``LoadPlan.targets``."""

    #: ``mapping``: an anonymous mapping for one target; ``arena``: part of a small shared mapping; ``mapped``: mapped
    #: pages of the file, without reads; ``existing``: memory of the caller; ``device``: memory of an accelerator;
    #: ``empty``: no bytes; ``file``: part of an output file.
    kind: BlockKind
    #: For ``arena`` and ``mapped``: position of its memory in ``LoadPlan.arenas`` or ``LoadPlan.mapped_ranges``.
    memory: int = 0
    #: First byte of the target in this memory; in a mapping of its own, for an address that is congruent with the file.
    offset: int = 0


class MappedRange(Struct, frozen=True, kw_only=True):
    """A range of a file that is mapped privately: pages are shared until they are written to."""

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte in the file. The mapping itself starts at the page boundary at or before it.
    offset: int
    #: Bytes of the range.
    nbytes: int


class Reservation(Struct, frozen=True, kw_only=True):
    """Allocation of the memory of one accelerator."""

    #: Bytes of the tensors.
    requested_bytes: int
    #: Bytes that the allocator counts as allocated: each tensor rounded up.
    allocated_bytes: int
    #: Bytes of the single block that is allocated and freed before the tensors; 0 for none.
    block_bytes: int
    #: Bytes that the allocator reserves from the device.
    reserved_bytes: int


class DevicePlan(Struct, frozen=True, kw_only=True):
    """The memory of one accelerator during a load."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Allocation of its memory.
    reservation: Reservation
    #: Bytes of the scratch memory for casts and views; 0 if not needed.
    scratch_bytes: int = 0
    #: Bytes of whole weights that wait for their finishers, and of what finishers take for a moment.
    working_bytes: int = 0

    @property
    def predicted_bytes(self) -> int:
        """Predicted growth of torch's reserved bytes, without cached memory."""
        return self.reservation.reserved_bytes + self.scratch_bytes + self.working_bytes


class LoadPlan(Struct, frozen=True, kw_only=True):
    """The complete decision of a load; the engine makes no further choices.

    ``blocks`` has one block per target, in the order of ``targets``.
    """

    #: Files to read.
    files: tuple[FileRecord, ...]
    #: Facts about the machine and the files.
    facts: MachineFacts
    #: Final memory and its fills.
    targets: tuple[Target, ...]
    #: Allocation of each target.
    blocks: tuple[Block, ...]
    #: Bytes of each shared mapping for small targets.
    arenas: tuple[int, ...]
    #: Reads, in the order in which they start.
    reads: tuple[Read, ...]
    #: Bytes of the reads.
    read_bytes: int
    #: Positions of the files that are read or mapped, in order: only these have to stay unchanged. Of a slice they are
    #: few, and looking at one can take a round trip.
    used_files: tuple[int, ...]
    #: Whether one of these files is not on this machine.
    remote: bool
    #: Number of reader threads; 0 to read in the thread of the caller: little data, or a limit on virtual memory.
    readers: int
    #: Number of threads that copy out of staging; 0 if each reader copies what it has read.
    copiers: int
    #: Bytes of one staging buffer.
    staging_buffer_bytes: int
    #: Number of staging buffers; 0 if every read goes to its final place.
    staging_buffers: int
    #: Bytes of the finished tensors that the load allocates or fills.
    final_bytes: int
    #: Predicted growth of the host's memory.
    predicted: Peaks
    #: Memory of each accelerator.
    devices: tuple[DevicePlan, ...] = ()
    #: Bytes of the scratch memory on each accelerator for casts and views, allocated at its first use.
    device_scratch_bytes: int = 0
    #: Reasons for the decisions, one sentence per reason.
    reasons: tuple[str, ...] = ()
    #: Whether pages of buffered reads are dropped from the page cache after use.
    drop_behind: bool = False
    #: Whether reads step down to the page cache when other processes read the same file, or have read it meanwhile.
    joins_readers: bool = False
    #: Most finished reads that may wait for finishers, which slows readers to their pace; 0 for no limit.
    most_unfinished_reads: int = 0
    #: Ranges of the files that stay mapped, for targets with a ``mapped`` block.
    mapped_ranges: tuple[MappedRange, ...] = ()
    #: Bytes of the targets that are mapped pages of the files.
    mapped_bytes: int = 0
    #: Whether staging is on huge pages. For reads of less than one, zeroing it would take longer than the read.
    huge_staging: bool = False
    #: Whether the thread of the caller runs it without a session: all of it goes through the page cache to the host.
    small: bool = False

    def traffic(self) -> Traffic:
        """Return the requests for remote files."""
        remote = {number for number, file in enumerate(self.facts.files) if file.filesystem == REMOTE_FILESYSTEM}
        if not remote:
            return Traffic()
        requests = (request for request in requests_of(self.reads) if request[0].file in remote)
        sizes = [request[-1].offset + request[-1].nbytes - request[0].offset for request in requests]
        return Traffic(len(sizes), sum(sizes))


class Traffic(NamedTuple):
    """Requests, and the bytes of their bodies."""

    #: Number of requests, including those that failed.
    requests: int = 0
    #: Bytes that were received.
    nbytes: int = 0


class RequestRecord(NamedTuple):
    """One request for an object, after its end; what ``on_request=`` of ``sluice.Remote`` receives."""

    #: Method of HTTP.
    method: str
    #: Address of the object as the user wrote it, without credentials and query.
    url: str
    #: Bytes of the body that were received.
    nbytes: int
    #: Seconds from the request to the end of the body, with those in which the caller did not read.
    seconds: float
    #: Status of the answer; None if there was none, or if the library that makes the requests does not tell.
    status: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReads:
    """Requests of a load for remote files, and the bytes that they bring. Listings of directories do not count.

    A load makes fewer requests than planned where the request for a header has brought tensors too, and more if
    requests failed and were repeated.
    """

    #: Requests from the opening of the files to the plan: for headers, and those that an open checkpoint made before.
    header_requests: int
    #: Bytes that they brought.
    header_bytes: int
    #: Requests that the plan makes for tensor data.
    planned_requests: int
    #: Bytes that it requests: tensor data, and gaps between ranges that are read together.
    planned_bytes: int
    #: Requests that were made for tensor data; None without a load.
    requests: int | None = None
    #: Bytes that they brought; None without a load.
    received_bytes: int | None = None

    def describe(self) -> str:
        """Return the figures as one line."""
        headers = f"{counted(self.header_requests, 'request')} for headers, {format_bytes(self.header_bytes)}"
        planned = f"{counted(self.planned_requests, 'request')} for tensors, {format_bytes(self.planned_bytes)}"
        if self.requests is None or self.received_bytes is None:
            return f"remote: {headers}; {planned}"
        if (self.requests, self.received_bytes) == (self.planned_requests, self.planned_bytes):
            return f"remote: {headers}; {planned}, as planned"
        made = f"{counted(self.requests, 'request')} for tensors, {format_bytes(self.received_bytes)}"
        planned = f"{self.planned_requests:,} and {format_bytes(self.planned_bytes)} planned"
        return f"remote: {headers}; {made} ({planned})"
