"""The records of tensors that are made of others, for ``Entry.composite``. ``_records`` offers them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from sluice._records import Entry

__all__ = ["Quantized", "Sparse"]


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
