"""What a checkpoint holds: its files, storages and tensors, without any tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from sluice._dtypes import ITEM_BYTES
from sluice._geometry import span_elements
from sluice._public import public
from sluice.records.elements import Elements, MathBit

__all__ = [
    "NO_STORAGE",
    "Entry",
    "FileIdentity",
    "FileRecord",
    "Index",
    "Opaque",
    "Part",
    "Quantized",
    "Sparse",
    "Storage",
    "UnsupportedValue",
]

#: ``Entry.storage`` of an entry that is made of others, or constant.
NO_STORAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
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

    def describe(self) -> str:
        """Return the identity as text for error messages."""
        if self.version is not None:
            return f"{self.nbytes} bytes, version {self.version!r}"
        if not self.inode:
            return f"{self.nbytes} bytes"
        return (
            f"{self.nbytes} bytes, inode {self.device}:{self.inode}, mtime {self.mtime_ns} ns, ctime {self.ctime_ns} ns"
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of an assembled entry, and the entry whose elements fill it."""

    #: Where they come from; its shape is that of the box. Never assembled itself.
    entry: Entry
    #: Position of the box's first element in each dimension of the whole.
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """How a sparse tensor is made of dense ones."""

    #: Its layout as torch spells it: ``"sparse_coo"``, ``"sparse_csr"``, ``"sparse_csc"``, ``"sparse_bsr"``,
    #: ``"sparse_bsc"``.
    layout: str
    #: COO: the coordinates, a row for each sparse dimension. Else the compressed indices and the plain ones.
    indices: tuple[Entry, ...]
    #: The elements that are there.
    values: Entry
    #: COO: whether the coordinates are sorted and distinct; None where the file does not say.
    coalesced: bool | None = None

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors."""
        return (*self.indices, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """How a quantized tensor is made of dense ones: an element is ``scale * (integer - zero_point)``."""

    #: The integers, in the layout of the tensor.
    values: Entry
    #: The scale, or the scale of each channel.
    scales: Entry | tuple[float, ...]
    #: The zero point, or the zero point of each channel.
    zero_points: Entry | tuple[float, ...]
    #: Dimension of the channels; None where one scale is for all.
    axis: int | None = None

    layout: ClassVar[str] = "quantized"

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors."""
        return (self.values, *(one for one in (self.scales, self.zero_points) if not isinstance(one, tuple)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor: a strided view of a storage, or a whole that is made of such views.

    Two names of one tensor object share one entry. The last three fields are set by rules; no file has them.
    """

    #: How its elements are stored and what is computed with them; those of an assembled entry are its parts'.
    elements: Elements
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
    #: Python attributes of the tensor object, by name: plain values and further tensors.
    attributes: dict[str, object] | None = field(default=None, compare=False)
    #: What every element is; None for elements of a file. Only parts are constant.
    constant: float | None = None
    #: Dtype that the finished tensor has, whatever else is asked for; None where no rule says.
    cast: str | None = None
    #: What rules made it of, in words; empty for a tensor as the file has it.
    origin: str = ""

    @property
    def dtype(self) -> str:
        """Name of its dtype, as torch spells it: ``"float32"``."""
        return self.elements.dtype

    @property
    def math_bits(self) -> tuple[MathBit, ...]:
        """Whether it is the conjugate, the negative or both of what its storage holds."""
        return self.elements.math_bits

    @property
    def layout(self) -> str:
        """How its elements are kept: ``"strided"`` for a dense tensor, else the layout of the composite."""
        return "strided" if self.composite is None else self.composite.layout

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors of a sparse or quantized tensor; a dense tensor itself."""
        return (self,) if self.composite is None else self.composite.components

    @property
    def byte_span(self) -> tuple[int, int]:
        """First byte of its elements in its storage, and the byte after the last element."""
        item_bytes = ITEM_BYTES[self.dtype]
        first = self.storage_offset * item_bytes
        return first, first + span_elements(self.shape, self.stride) * item_bytes

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


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """An object of a pickle that sluice does not build: that would mean to import or call what the file names."""

    #: Its qualified name, as the file gives it: ``"argparse.Namespace"``.
    qualified_name: str

    def __repr__(self) -> str:
        return f"<not loaded: {self.qualified_name}>"


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedValue(Opaque):
    """A tensor, or another value, of a kind that sluice does not read. Its qualified name is what the file calls it."""

    #: What it is, in words: ``"a nested tensor"``.
    reason: str
    #: The file that holds it.
    file: str

    def __repr__(self) -> str:
        return f"<not loaded: {self.reason}, {self.qualified_name}>"


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
    #: Those of them that say where the files contradict each other, though every tensor is there.
    contradictions: tuple[str, ...] = ()
    #: First byte behind it in its only file, where something else may follow; None where the file must end with it.
    end: int | None = None
