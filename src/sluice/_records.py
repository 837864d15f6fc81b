"""The frozen records that cross layers, in the order in which a load produces them.

source -> format: ``FileIdentity``, ``FileRecord``
format -> index:  ``Storage``, ``Entry``, ``Part``, ``Sparse``, ``Quantized``, ``Opaque``, ``Index``
index -> targets: ``Request``, ``Fill``, ``Constant``, ``Target``
facts:            ``FileFacts``, ``DeviceFacts``, ``MachineFacts``
plan:             ``Copy``, ``Read``, ``Block``, ``MappedRange``, ``Peaks``, ``Reservation``, ``DevicePlan``,
                  ``LoadPlan``

No record holds a tensor, and none of them imports torch. Offsets and sizes are bytes unless a name says elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sluice._composite_records import Quantized, Sparse
from sluice._dtypes import ITEM_BYTES

__all__ = [
    "NO_STORAGE",
    "Block",
    "BlockKind",
    "Constant",
    "Copy",
    "DeviceFacts",
    "DeviceMemory",
    "DevicePlan",
    "Entry",
    "FileFacts",
    "FileIdentity",
    "FileRecord",
    "Fill",
    "Index",
    "LoadPlan",
    "MachineFacts",
    "MappedRange",
    "MathBit",
    "Method",
    "Opaque",
    "Part",
    "Peaks",
    "Quantized",
    "Read",
    "Request",
    "Reservation",
    "Sparse",
    "Storage",
    "Swap",
    "Target",
]

#: How a read is done: ``direct`` bypasses the page cache (O_DIRECT), ``buffered`` goes through it.
Method = Literal["direct", "buffered"]

#: How final memory comes to be; see ``Block.kind``.
BlockKind = Literal["mapping", "arena", "mapped", "existing", "device", "empty"]

#: Bits by which a tensor says that it is the conjugate or the negative of what its storage holds.
MathBit = Literal["conj", "neg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """What must not change between planning a load and its end."""

    #: ``st_dev``.
    device: int
    #: ``st_ino``.
    inode: int
    #: Size of the file in bytes.
    nbytes: int
    #: Last change of the contents, in nanoseconds since the epoch.
    mtime_ns: int
    #: Last change of the inode, in nanoseconds since the epoch: catches rewrites that restore ``mtime``.
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    #: Path as the user would type it; used in messages and to open it.
    path: str
    #: Its identity when it was indexed.
    identity: FileIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A contiguous range of bytes that one or more entries view."""

    #: Position of the file in ``Index.files``.
    file: int
    #: First byte of the data in the file; of the record's local header for a storage that is not ``located``.
    offset: int
    #: Bytes of data.
    nbytes: int
    #: Name of the storage inside its file, for messages and for telling shared storages.
    key: str
    #: Whether ``offset`` is that of the data. Zip files know it only after their local headers were read.
    located: bool = True
    #: Bytes of each number in it that is stored with the most significant byte first; 0 where none is.
    swap_bytes: int = 0


#: ``Entry.storage`` of an entry that is made of others, or constant.
NO_STORAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of an assembled entry, and the entry whose elements fill it."""

    #: Where they come from; its shape is that of the box. Never assembled itself.
    entry: Entry
    #: Position of the box's first element in each dimension of the whole.
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor: a strided view of a storage, or a whole that is made of such views.

    Two names of one tensor object share one entry. The last four fields are what rules ask for; no file has them.
    """

    #: Name of its dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements; empty for a sparse tensor, which has none.
    stride: tuple[int, ...]
    #: Position of the storage in ``Index.storages``; ``NO_STORAGE`` for an entry that is constant, has parts or is a
    #: composite.
    storage: int
    #: First element of the view in its storage, in elements.
    storage_offset: int = 0
    #: Whether the file holds it as a ``torch.nn.Parameter``.
    parameter: bool = False
    #: Whether gradients are recorded for it.
    requires_grad: bool = False
    #: The boxes that it is assembled from, which cover it without overlap; none for a view of one storage.
    parts: tuple[Part, ...] = ()
    #: What a sparse or quantized tensor is made of; None for a dense one.
    composite: Sparse | Quantized | None = None
    #: Whether it is the conjugate, the negative or both of what its storage holds; of an assembled entry its parts say.
    math_bits: tuple[MathBit, ...] = ()
    #: Python attributes of the tensor object, by name: plain values and further tensors.
    attributes: dict[str, object] | None = field(default=None, compare=False)
    #: What every element is; None for elements of a file. Only parts are constant.
    constant: float | None = None
    #: What elements are multiplied by, one number after the other, in ``dtype``; those of an assembled entry are its
    #: parts'.
    factors: tuple[float, ...] = ()
    #: Dtype that the finished tensor has, whatever else is asked for; None where no rule says.
    cast: str | None = None
    #: What rules made it of, in words; empty for a tensor as the file has it.
    origin: str = ""

    @property
    def layout(self) -> str:
        """How its elements are kept: ``"strided"`` for a dense tensor, else the layout of the composite."""
        return "strided" if self.composite is None else self.composite.layout

    @property
    def pieces(self) -> tuple[Entry, ...]:
        """The views of storages and constants that it is made of; itself, when it is one."""
        if self.composite is not None:
            return self.composite.components
        return tuple(part.entry for part in self.parts) or (self,)

    @property
    def storages(self) -> tuple[int, ...]:
        """Positions of the storages that its elements lie in."""
        if self.storage != NO_STORAGE:
            return (self.storage,)
        return tuple(dict.fromkeys(piece.storage for piece in self.pieces if piece.constant is None))

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once for each place in the shape; of a composite all that it needs."""
        if self.composite is not None:
            return sum(component.nbytes for component in self.composite.components)
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """An object of a pickle that sluice does not build: that would mean to import or call what the file names."""

    #: Its qualified name, as the file gives it: ``"argparse.Namespace"``.
    qualified_name: str

    def __repr__(self) -> str:
        return f"<not loaded: {self.qualified_name}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Every tensor of a checkpoint, without any tensor data."""

    #: Name of the format: ``"torch-zip"``, ``"torch-legacy"``, ``"safetensors"``.
    format: str
    #: The files that hold data or described it.
    files: tuple[FileRecord, ...]
    #: The byte ranges that entries view; ``Entry.storage`` counts here.
    storages: tuple[Storage, ...]
    #: The nested object of the file: dict, list, tuple and plain values, with ``Entry`` and ``Opaque`` leaves.
    tree: object
    #: Text that the file says of itself (safetensors ``__metadata__``; format version and byte order of a zip file).
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()
    #: First byte behind it in its only file, where something else may follow; None where the file must end with it.
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One finished tensor that is wanted: which entry, and as what."""

    #: Name in the result: that of the parameter, the buffer or the state-dict entry.
    name: str
    #: Where its bytes come from.
    entry: Entry
    #: Dtype of the finished tensor.
    dtype: str
    #: Device of the finished tensor, as torch writes it: ``"cpu"``, ``"cuda:0"``.
    device: str
    #: Step of each dimension of the finished tensor, in elements; None keeps the entry's where that wastes nothing.
    stride: tuple[int, ...] | None = None
    #: True where the caller supplies the memory (a live tensor filled in place), False where it is allocated.
    existing: bool = False
    #: True where it takes the place of a live tensor, whose memory goes as soon as this one is whole.
    replaces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A rectangular strided copy out of a file: the only way by which bytes reach a target.

    Element ``i, j, ...`` of ``shape`` is read at ``offset + item * (i*source_stride[0] + ...)`` in the file and
    written at ``target_start + i*target_stride[0] + ...`` elements in the target, multiplied by the factors in its own
    dtype and then cast to the target's. Whole tensors, views, slices, transposes, parts of a fused weight and shards
    are all fills.
    """

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte of element 0 in the file.
    offset: int
    #: Dtype of the bytes in the file.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the file, in elements of ``dtype``.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements of the target's dtype.
    target_stride: tuple[int, ...]
    #: Where element 0 goes, in elements from the start of the target.
    target_start: int = 0
    #: What each element is multiplied by, one number after the other.
    factors: tuple[float, ...] = ()
    #: Bytes of each number that is stored with the most significant byte first; 0 where none is.
    swap_bytes: int = 0
    #: What is done to the elements before.
    math_bits: tuple[MathBit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A box of a target that no file fills: the rows that a larger vocabulary adds."""

    #: What every element is.
    value: float
    #: Dtype that it is rounded to, and multiplied in, before the cast to the target's.
    dtype: str
    #: What it is multiplied by, one number after the other.
    factors: tuple[float, ...] = ()
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Where element 0 goes, in elements from the start of the target.
    target_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Final memory of one or more tensors, and what fills it."""

    #: Name for messages and progress: that of its first tensor.
    name: str
    #: Dtype of the finished elements.
    dtype: str
    #: Bytes of the finished memory.
    nbytes: int
    #: Device as torch writes it: ``"cpu"``, ``"cuda:0"``.
    device: str
    #: The copies that fill it. With the constants they cover what its tensors view.
    fills: tuple[Fill, ...]
    #: What no file fills; written before the first fill.
    constants: tuple[Constant, ...] = ()
    #: True where the caller supplies the memory (a live parameter filled in place), False where it is allocated.
    existing: bool = False
    #: True where it takes the place of a live tensor, whose memory goes as soon as this one is whole.
    replaces: bool = False
    #: What rules made it of, in words; empty for a tensor as the file has it.
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What was asked of the file system about one file."""

    #: Name of the file system: ``"ext4"``, ``"nfs4"``, ``"tmpfs"``; empty when unknown.
    filesystem: str
    #: Whether opening it for direct I/O is worth trying: a local disk whose file system accepts it.
    direct_io: bool
    #: Bytes between two page-cache probes.
    probe_step_bytes: int
    #: One flag for each probe: whether the page at ``i * probe_step_bytes`` was cached; empty when that cannot be told.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A strided copy from a read's bytes to a target; ``Fill`` cut to what one read holds."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: First byte of element 0, counted from ``Read.offset``.
    offset: int
    #: Dtype of the bytes that were read.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the bytes that were read, in elements.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Where element 0 goes, in elements from the start of the target.
    target_start: int
    #: What each element is multiplied by, one number after the other, before it is cast.
    factors: tuple[float, ...] = ()
    #: Where in the staging buffer, in bytes from its start, it is cast before it is sent to an accelerator; None casts
    #: at the target.
    cast_at: int | None = None
    #: What is done to the elements on the way.
    math_bits: tuple[MathBit, ...] = ()


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
    #: Without ``into``: the ranges whose byte order is turned round before the copies. They do not overlap.
    swaps: tuple[Swap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One allocation of final memory, for the target at the same position of ``LoadPlan.targets``."""

    #: ``mapping``: an anonymous mapping of its own; ``arena``: a part of a small shared mapping; ``mapped``: pages of
    #: the file itself, which nothing reads; ``existing``: the caller's memory; ``device``: memory of an accelerator;
    #: ``empty``: no bytes at all.
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
class Peaks:
    """Growth of memory during a load, in bytes: predicted by a plan or measured beside it."""

    #: Private anonymous memory.
    anon_bytes: int
    #: Pages of mapped files.
    file_bytes: int
    #: Shared memory.
    shmem_bytes: int
    #: Peak of the three together, which can be less than the sum of their peaks.
    total_bytes: int


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
class DeviceMemory:
    """Growth of one accelerator's memory during a load, in bytes: predicted beside measured."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: What the tensors asked for.
    requested_bytes: int
    #: What the plan predicted that torch's allocator would reserve, were nothing cached.
    predicted_bytes: int
    #: What torch's allocator has more allocated than before; None where it does not say.
    allocated_bytes: int | None = None
    #: What torch's allocator has more reserved than before; None where it does not say.
    reserved_bytes: int | None = None


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
    #: Threads that read.
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
    #: Why the plan is as it is, a sentence each.
    reasons: tuple[str, ...] = ()
    #: Whether buffered pages are dropped from the page cache once they were used.
    drop_behind: bool = False
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
