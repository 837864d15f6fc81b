"""The tensors that are wanted, the memory that they end in, and what fills it."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.records.elements import Elements, MathBit
from sluice.records.index import Entry

__all__ = ["Constant", "Fill", "Finisher", "Request", "Target", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finisher:
    """What is done with a whole weight once its last byte has arrived: a tensor takes its place."""

    #: Name of the function, which whoever runs the plan supplies.
    name: str
    #: Sizes of the weight that it gets, in elements; row-major.
    shape: tuple[int, ...]
    #: Bytes of the tensor that it returns.
    finished_bytes: int


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
    #: True where it shares memory with no other tensor, whatever the file does.
    alone: bool = False
    #: The part of the entry that the tensor holds: for each dimension ascending intervals ``(start, stop)`` of
    #: positions; None for the whole entry.
    region: tuple[tuple[tuple[int, int], ...], ...] | None = None
    #: What is done with the whole tensor once it has arrived; only for a row-major tensor on the host.
    finisher: Finisher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A rectangular strided copy out of a file: the only way by which bytes reach a target.

    Element ``i, j, ...`` of ``shape`` is read at ``offset + item * (i*source_stride[0] + ...)`` in the file and
    written at ``target_start + i*target_stride[0] + ...`` elements in the target, computed in its own dtype as its
    ``elements`` say and then cast to the target's. Whole tensors, views, slices, transposes, parts of a fused weight
    and shards are all fills. With a row kernel, finished row ``i`` begins at ``target_start + i*target_stride[0]``.
    """

    #: Position of the file in ``LoadPlan.files``.
    file: int
    #: First byte of element 0 in the file.
    offset: int
    #: How the elements lie in the file, and what is computed with them.
    elements: Elements
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the file, in elements.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements of the target's dtype.
    target_stride: tuple[int, ...]
    #: Where element 0 goes, in elements from the start of the target.
    target_start: int = 0

    @property
    def dtype(self) -> str:
        """Dtype of the elements in the file."""
        return self.elements.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A box of a target that no file fills: the rows that a larger vocabulary adds."""

    #: What every element is.
    value: float
    #: Dtype that it is rounded to, and what is computed with it, before the cast to the target's dtype.
    elements: Elements
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
    #: What is done with the whole; None leaves it in place.
    finisher: Finisher | None = None
    #: What rules made it of, in words; empty for a tensor as the file has it.
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A finished tensor: a strided view of a target."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: Element 0, in elements from the start of the target.
    start: int
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
    #: Bits that the finished tensor gets: its memory holds the conjugate, the negative or both.
    math_bits: tuple[MathBit, ...] = ()
