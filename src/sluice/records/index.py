"""Contents of a checkpoint: files, storages and tensors, without tensor data."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from math import prod
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice._public import public
from sluice.records.elements import Elements, elements_of
from sluice.records.facts import FileRecord
from sluice.records.geometry import contiguous_stride, span_elements

__all__ = [
    "NO_STORAGE",
    "Entry",
    "Index",
    "Opaque",
    "Part",
    "Quantized",
    "Sparse",
    "Storage",
    "TorchSize",
    "TorchText",
    "UnsupportedValue",
    "collector_paused",
    "row_major",
]

#: ``Entry.storage`` of an entry that is constant, assembled from parts, a composite, or computed.
NO_STORAGE = -1


class Storage(Struct, frozen=True, gc=False):
    """A contiguous range of bytes that one or more entries view."""

    #: Position of the file in ``Index.files``.
    file: int
    #: First byte of the data in the file, or of the local header of the zip record if not ``located``.
    offset: int
    #: Bytes of data.
    nbytes: int
    #: Name of the storage inside its file, which identifies shared storages.
    key: str
    #: Whether ``offset`` is the offset of the data. In zip files it is known only after the local header was read.
    located: bool = True
    #: Bytes of each big-endian real number in it; 0 for little-endian numbers.
    swap_bytes: int = 0


class Part(Struct, frozen=True, kw_only=True):
    """A box of an assembled entry, and the entry whose elements fill it."""

    #: Source of the elements; its shape is that of the box. It has no parts.
    entry: Entry
    #: Position of the box's first element in each dimension of the whole.
    start: tuple[int, ...]


class Sparse(Struct, frozen=True, kw_only=True):
    """Representation of a sparse tensor by dense ones."""

    #: Layout, as torch spells it: ``"sparse_coo"``, ``"sparse_csr"``, ``"sparse_csc"``, ``"sparse_bsr"``,
    #: ``"sparse_bsc"``.
    layout: str
    #: COO: the coordinates, one row per sparse dimension. Otherwise the compressed and the plain indices.
    indices: tuple[Entry, ...]
    #: The specified elements.
    values: Entry
    #: COO: whether the coordinates are sorted and distinct; None if unknown.
    coalesced: bool | None = None

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors."""
        return (*self.indices, self.values)


class Quantized(Struct, frozen=True, kw_only=True):
    """Representation of a quantized tensor by dense ones: an element is ``scale * (integer - zero_point)``."""

    #: The integers, in the layout of the tensor.
    values: Entry
    #: The scale, or the scale of each channel.
    scales: Entry | tuple[float, ...]
    #: The zero point, or the zero point of each channel.
    zero_points: Entry | tuple[float, ...]
    #: Dimension of the channels; None for one scale per tensor.
    axis: int | None = None

    layout: ClassVar[str] = "quantized"

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors."""
        return (self.values, *(entry for entry in (self.scales, self.zero_points) if not isinstance(entry, tuple)))


class Entry(Struct, frozen=True, eq=False, gc=False):
    """One tensor: a strided view of a storage, or assembled from such views.

    Two names of one tensor object share an entry. Only rules set ``constant``, ``cast`` and ``origin``. Entries are
    equal if all fields but ``attributes`` are: those cannot be hashed.
    """

    #: Stored form of its elements, and computations on them; of an assembled entry see those of its parts.
    elements: Elements
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements; empty for a sparse tensor.
    stride: tuple[int, ...]
    #: Position of the storage in ``Index.storages``; ``NO_STORAGE`` for an entry that is constant, has parts or is a
    #: composite.
    storage: int
    #: First element of the view in its storage, in elements.
    storage_offset: int = 0
    #: Whether it is a ``torch.nn.Parameter`` in the file.
    parameter: bool = False
    #: Whether it requires gradients.
    requires_grad: bool = False
    #: Boxes that it is assembled from, which cover it without overlap; empty for a view of one storage.
    parts: tuple[Part, ...] = ()
    #: Components of a sparse or quantized tensor; None for a dense tensor.
    composite: Sparse | Quantized | None = None
    #: Python attributes of the tensor object, by name: plain values and further tensors.
    attributes: dict[str, object] | None = None
    #: Value of every element; None for elements of a file. Only entries of parts are constant.
    constant: float | None = None
    #: Dtype of the finished tensor, which overrides the requested one; None without a rule that casts.
    cast: str | None = None
    #: Description of the tensors from which rules produced it; empty for a tensor of the file.
    origin: str = ""
    #: Whether the file holds a storage here, without a tensor: all its elements, in one dimension.
    bare: bool = False

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Entry and self._compared == other._compared)

    def __ne__(self, other: object) -> bool:  # Struct defines it by identity
        return not self == other

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple[object, ...]:
        view = self.storage, self.storage_offset, self.shape, self.stride, self.elements
        flags = self.parameter, self.requires_grad, self.bare
        return *view, *flags, self.parts, self.composite, self.constant, self.cast, self.origin

    @property
    def dtype(self) -> str:
        """Name of the dtype, as torch spells it: ``"float32"``."""
        return self.elements.dtype

    @property
    def stored(self) -> Entry:
        """The same view of its storage, with the conjugation or negation left to the view."""
        return replace(self, elements=replace(self.elements, math_bits=())) if self.elements.view_bits else self

    @property
    def layout(self) -> str:
        """``"strided"`` for a dense tensor, otherwise the layout of the composite."""
        return "strided" if self.composite is None else self.composite.layout

    @property
    def components(self) -> tuple[Entry, ...]:
        """The dense tensors of a sparse or quantized tensor, or the dense tensor itself."""
        return (self,) if self.composite is None else self.composite.components

    @property
    def byte_span(self) -> tuple[int, int]:
        """First byte of its elements in its storage, and the first byte after them; whole packs of packed elements."""
        first, item_bytes = self.storage_offset, self.elements.item_bytes
        end = first + span_elements(self.shape, self.stride)
        if (packing := self.elements.packing) is not None:
            first, end = first // packing.elements, -(-end // packing.elements)
        return first * item_bytes, end * item_bytes

    @property
    def pieces(self) -> tuple[Entry, ...]:
        """The views of storages and the constants that it consists of; the entry itself if it is one of these."""
        if self.composite is not None:
            return self.composite.components
        return tuple(part.entry for part in self.parts) or (self,)

    @property
    def storages(self) -> tuple[int, ...]:
        """Positions of the storages that contain its elements."""
        if self.storage != NO_STORAGE:
            return (self.storage,)
        return tuple(dict.fromkeys(piece.storage for piece in self.pieces if piece.constant is None))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, decoded, with repeated ones counted each time; of all components of a composite."""
        if self.composite is not None:
            return sum(component.nbytes for component in self.composite.components)
        return self.numel * ITEM_BYTES[self.dtype]


def row_major(dtype: str, shape: tuple[int, ...], storage: int, parts: tuple[Part, ...] = ()) -> Entry:
    """Return the entry of a plain tensor whose elements are in order, at the beginning of a storage or in parts."""
    stride = contiguous_stride(shape)
    return Entry(elements=elements_of(dtype), shape=shape, stride=stride, storage=storage, parts=parts)


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """An object of a pickle that sluice does not build, because that would import or call code named in the file."""

    #: Qualified name in the file: ``"argparse.Namespace"``.
    qualified_name: str

    def __repr__(self) -> str:
        return f"<not loaded: {self.qualified_name}>"


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedValue(Opaque):
    """A tensor or other value of a kind that sluice does not read. Its qualified name is that in the file."""

    #: Description of the kind: ``"a nested tensor"``.
    reason: str
    #: The file that holds it.
    file: str
    #: Next step for the user; None for that of its error.
    advice: str | None = None
    #: Attributes of a tensor that wraps others, by name, with an ``Entry`` for each of these; None for other kinds.
    inner: Mapping[str, object] | None = dataclass_field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<not loaded: {self.reason}, {self.qualified_name}>"


class TorchText(str):
    """A ``torch.dtype``, ``torch.layout`` or quantization scheme (``"torch.float32"``), or a device (``"cuda:0"``)."""

    __slots__ = ()


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


class Index(Struct, frozen=True, kw_only=True):
    """Every tensor of a checkpoint, without any tensor data."""

    #: Name of the format, such as ``"torch-zip"`` or ``"safetensors"``; see ``OpenCheckpoint.format``.
    format: str
    #: Files that contain tensor data or metadata.
    files: tuple[FileRecord, ...]
    #: Byte ranges that entries view; ``Entry.storage`` is a position in this tuple.
    storages: tuple[Storage, ...]
    #: The nested object of the file: dict, list, tuple and plain values, with ``Entry`` and ``Opaque`` leaves.
    tree: object
    #: CRC-32 of the bytes of each storage, 0 if it is unknown; empty if the format records none.
    crcs: Sequence[int] = ()
    #: Metadata of the file as text (safetensors ``__metadata__``; format version and byte order of a zip file).
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Notes for the report, one sentence per note.
    notes: tuple[str, ...] = ()
    #: Those notes that report contradictions between files although every tensor exists.
    contradictions: tuple[str, ...] = ()
    #: Further names that one file declares for tensors, which it or another file stores: ``{name: stored name}``. Empty
    #: for a checkpoint: its tree has them.
    tied: Mapping[str, str] = field(default_factory=dict)
    #: Whether every storage is known to be ``located``.
    located: bool = False
    #: First byte after the checkpoint in its only file if other data may follow; None if the file must end there.
    end: int | None = None
    #: End of the record of storages that are not followed by another one, by the offset of the local header.
    record_ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def zipped(self) -> bool:
        """Whether it is that of a zip file of torch, whose metadata describes only the archive."""
        return self.format.removeprefix("tar-") in {"torch-zip", "torch-script", "torch-export"}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector while an index or a module is built, a load planned or a module filled.

    Its passes over a growing heap of records without cycles free nothing and take a third of the time; one over all
    objects takes 0.1 s once torch is imported. The pause affects the whole process, so keep it short. A collector that
    is disabled stays disabled.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
