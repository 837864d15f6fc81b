"""The complete decision of a load: what the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice.records.elements import Elements
from sluice.records.facts import MachineFacts
from sluice.records.index import FileRecord
from sluice.records.memory import Peaks
from sluice.records.targets import Target

__all__ = [
    "Block",
    "BlockKind",
    "Copy",
    "DevicePlan",
    "LoadPlan",
    "MappedRange",
    "Method",
    "Read",
    "Reservation",
    "Swap",
]

#: How a read is done: ``direct`` bypasses the page cache (O_DIRECT), ``buffered`` goes through it.
Method = Literal["direct", "buffered"]

#: How final memory comes to be; see ``Block.kind``.
BlockKind = Literal["mapping", "arena", "mapped", "existing", "device", "empty", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A strided copy from a read's bytes to a target; ``Fill`` cut to what one read holds."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: First byte of element 0, counted from ``Read.offset``.
    offset: int
    #: The elements that were read, after swaps, and what is computed with them.
    elements: Elements
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the bytes that were read, in elements.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Where element 0 goes, in elements from the start of the target.
    target_start: int
    #: Where in the staging buffer, in bytes from its start, it is cast before it is sent to an accelerator; None casts
    #: at the target.
    cast_at: int | None = None
    #: With a row kernel: position of the first row in its fill.
    first_row: int = 0

    @property
    def dtype(self) -> str:
        """Dtype of the elements that were read."""
        return self.elements.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A range of a read whose numbers are stored with the most significant byte first."""

    #: First byte, counted from ``Read.offset``.
    offset: int
    #: Bytes of the range: a multiple of those of a number.
    nbytes: int
    #: Bytes of one number: an element, or either half of a complex one.
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One contiguous range of one file, and where it goes."""

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte in the file.
    offset: int
    #: Bytes to read.
    nbytes: int
    #: Permitted methods, the preferred first; the engine may only step down.
    methods: tuple[Method, ...]
    #: Target that receives the bytes without staging, or None.
    into: int | None = None
    #: With ``into``: where the bytes go, counted from the start of the target.
    into_offset: int = 0
    #: Without ``into``: the copies out of the staging buffer.
    copies: tuple[Copy, ...] = ()
    #: Without ``into``: the ranges whose byte order is turned round. They do not overlap.
    swaps: tuple[Swap, ...] = ()
    #: Without ``into``: how many of the copies, the first ones, are made before the swaps: of bytes that they want as
    #: the file has them and that another copy wants turned round.
    copies_before_swaps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One allocation of final memory, for the target at the same position of ``LoadPlan.targets``."""

    #: ``mapping``: an anonymous mapping of its own; ``arena``: a part of a small shared mapping; ``mapped``: pages of
    #: the file itself, which nothing reads; ``existing``: the caller's memory; ``device``: memory of an accelerator;
    #: ``empty``: no bytes at all; ``file``: a part of a file under construction.
    kind: BlockKind
    #: Bytes before the target in its allocation: they make its address congruent with the file for direct reads.
    lead_bytes: int = 0
    #: For ``arena``: which one, in the order of ``LoadPlan.arenas``.
    arena: int = 0
    #: For ``arena``: first byte of the target in it.
    arena_offset: int = 0
    #: For ``mapped``: in which range it lies, in the order of ``LoadPlan.mapped_ranges``.
    mapped_range: int = 0
    #: For ``mapped``: first byte of the target in it.
    mapped_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedRange:
    """A range of a file that is mapped privately: shared pages until one is written to."""

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte in the file; whoever maps it begins at the page below.
    offset: int
    #: Bytes of the range.
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """How the memory of one accelerator is taken."""

    #: Bytes that the tensors ask for.
    requested_bytes: int
    #: Bytes that the allocator will count as allocated: each tensor rounded up.
    allocated_bytes: int
    #: Bytes of the one block that is taken and freed before the tensors; 0 for none.
    block_bytes: int
    #: Bytes that the allocator will have reserved from the device.
    reserved_bytes: int
    #: The same, were the block refused and each tensor allocated by itself.
    reserved_apart_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The memory of one accelerator during a load."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: How its memory is taken.
    reservation: Reservation
    #: Bytes of the scratch in which casts and views are made; 0 when none is needed.
    scratch_bytes: int = 0

    @property
    def predicted_bytes(self) -> int:
        """Growth of what torch's allocator reserves, were nothing cached."""
        return self.reservation.reserved_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The complete decision of a load: the engine adds nothing to it.

    ``blocks`` and ``targets`` run in parallel.
    """

    #: Files to read.
    files: tuple[FileRecord, ...]
    #: What was asked of the machine.
    facts: MachineFacts
    #: Final memory and what fills it.
    targets: tuple[Target, ...]
    #: How each target is allocated.
    blocks: tuple[Block, ...]
    #: Bytes of each shared mapping for small targets.
    arenas: tuple[int, ...]
    #: Reads in the order in which they start.
    reads: tuple[Read, ...]
    #: Threads that read; with 0, under a limit on virtual memory, the caller's does.
    readers: int
    #: Threads that copy out of staging what was read into it; with 0 each reader does it.
    copiers: int
    #: Bytes of one staging buffer.
    staging_buffer_bytes: int
    #: Number of staging buffers; 0 when every read goes to its final place.
    staging_buffers: int
    #: Bytes of the finished tensors that the load allocates or fills.
    final_bytes: int
    #: Predicted growth of the host's memory.
    predicted: Peaks
    #: Memory of each accelerator.
    devices: tuple[DevicePlan, ...] = ()
    #: Bytes of the device memory through which casts and views reach an accelerator, allocated when the first is made.
    device_scratch_bytes: int = 0
    #: Why the plan is as it is, a sentence each.
    reasons: tuple[str, ...] = ()
    #: Whether buffered pages are dropped from the page cache once they were used.
    drop_behind: bool = False
    #: Reads whose results may wait for the caller, so that finishers keep up with the readers; 0 for any number.
    most_unfinished_reads: int = 0
    #: Ranges of the files that stay mapped, for the targets whose block is ``mapped``.
    mapped_ranges: tuple[MappedRange, ...] = ()

    @property
    def read_bytes(self) -> int:
        """Bytes that will be read from files."""
        return sum(read.nbytes for read in self.reads)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the targets that are pages of the files."""
        pairs = zip(self.targets, self.blocks, strict=True)
        return sum(target.nbytes for target, block in pairs if block.kind == "mapped")
