"""Requested tensors, their final memory, and the copies that fill it."""

from __future__ import annotations

from msgspec import Struct

from sluice.records.elements import Elements
from sluice.records.index import Entry

__all__ = ["Constant", "Fill", "Finisher", "Request", "Target", "View"]


class Finisher(Struct, frozen=True, kw_only=True):
    """A computation on a whole weight after its last byte has arrived; its result replaces the weight."""

    #: Name of the function, which the caller of the engine supplies.
    name: str
    #: Shape of the weight that it receives, in elements; row-major.
    shape: tuple[int, ...]
    #: Bytes of each plain tensor of which its result consists.
    finished_sizes: tuple[int, ...]

    @property
    def finished_bytes(self) -> int:
        """Bytes of its result."""
        return sum(self.finished_sizes)


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """One requested tensor: its entry, and its final form."""

    #: Name in the result: that of the parameter, the buffer or the state-dict entry.
    name: str
    #: Source of its bytes.
    entry: Entry
    #: Dtype of the finished tensor.
    dtype: str
    #: Device of the finished tensor, as torch writes it: ``"cpu"``, ``"cuda:0"``.
    device: str
    #: Step of each dimension of the finished tensor, in elements; None keeps the entry's if that leaves no gaps.
    stride: tuple[int, ...] | None = None
    #: Whether the caller supplies the memory (a live tensor filled in place); otherwise it is allocated.
    existing: bool = False
    #: Whether it replaces a live tensor, whose memory is released as soon as this tensor is complete.
    replaces: bool = False
    #: Whether it must not share memory with other tensors, even if they share storage in the file.
    alone: bool = False
    #: Computation on the complete tensor; only for a row-major tensor on the host.
    finisher: Finisher | None = None


class Fill(Struct, frozen=True, kw_only=True, gc=False):
    """A rectangular strided copy from a file to a target; all bytes of files reach targets this way.

    Element ``i, j, ...`` of ``shape`` is read at ``offset + item * (i*source_stride[0] + ...)`` in the file and
    written at ``target_start + i*target_stride[0] + ...`` elements in the target. The computations of ``elements`` are
    done in the dtype of the file, before the cast to the dtype of the target. Whole tensors, views, slices,
    transposes, parts of a fused weight and shards are all fills. Of packed elements, ``i, j, ...`` is a pack, and its
    elements are written ``target_step`` apart; see ``Packing``.
    """

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte of element 0 in the file.
    offset: int
    #: Stored form of the elements, and computations on them.
    elements: Elements
    #: Size of each dimension, in elements or packs.
    shape: tuple[int, ...]
    #: Step of each dimension in the file, in elements or packs.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements of the target's dtype.
    target_stride: tuple[int, ...]
    #: Position of element 0 in the target, in elements.
    target_start: int = 0

    @property
    def dtype(self) -> str:
        """Dtype of the elements in the file."""
        return self.elements.dtype


class Constant(Struct, frozen=True, kw_only=True):
    """A box of a target with a constant value, such as the rows that a larger vocabulary adds."""

    #: Value of every element.
    value: float
    #: Dtype to which the value is rounded, and computations on it, before the cast to the dtype of the target.
    elements: Elements
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Position of element 0 in the target, in elements.
    target_start: int


class Target(Struct, frozen=True, kw_only=True, gc=False):
    """Final memory of one or more tensors, and the copies that fill it."""

    #: Name of its first tensor, for messages and progress.
    name: str
    #: Dtype of the finished elements.
    dtype: str
    #: Bytes of the finished memory.
    nbytes: int
    #: Device as torch writes it: ``"cpu"``, ``"cuda:0"``.
    device: str
    #: Copies that fill it. Together with the constants they cover the elements that its tensors view.
    fills: tuple[Fill, ...]
    #: Boxes with a constant value, written before the first fill.
    constants: tuple[Constant, ...] = ()
    #: Whether the caller supplies the memory (a live parameter filled in place); otherwise it is allocated.
    existing: bool = False
    #: Whether it replaces a live tensor, whose memory is released as soon as this target is complete.
    replaces: bool = False
    #: Computation on the complete target; None for none.
    finisher: Finisher | None = None
    #: Description of the tensors from which rules produced it; empty for a tensor of the file.
    origin: str = ""


class View(Struct, frozen=True, kw_only=True, gc=False):
    """A finished tensor: a strided view of a target."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: Position of element 0 in the target, in elements.
    start: int
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
