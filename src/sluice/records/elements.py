"""How elements are stored, and what is computed with each of them on its way to a target.

Every record that describes elements (``Entry``, ``Fill``, ``Copy``, ``Constant``) holds one ``Elements``. A new
elementwise property is a field here, and its computation in ``sluice.engine.host_copies``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

__all__ = ["Elements", "MathBit", "RowKernel", "elements_of"]

#: Lazy operations that torch records as a bit of a tensor: it is the conjugate or the negative of its storage.
MathBit = Literal["conj", "neg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """A computation on whole rows, the first dimension of a fill.

    Its result for a row depends only on that row and its position, so that any number of rows may be computed at once.
    """

    #: Name of the function; see ``sluice.engine.row_kernels``.
    name: str
    #: Elements of one finished row, which are contiguous in the target.
    row_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """The stored form of elements, and what is computed with each one, in the order of the fields."""

    #: Name of the dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Bytes of each number that is stored with the most significant byte first; 0 for little-endian numbers.
    swap_bytes: int = 0
    #: Whether the conjugate, the negative or both of the stored element is meant.
    math_bits: tuple[MathBit, ...] = ()
    #: Numbers that each element is multiplied by, one after the other, in ``dtype``.
    factors: tuple[float, ...] = ()
    #: Computation on whole rows; None if each element stands alone.
    kernel: RowKernel | None = None

    @property
    def computed(self) -> bool:
        """Whether elements are computed with, besides a change of byte order or a cast."""
        return bool(self.math_bits or self.factors or self.kernel)

    @property
    def verbatim(self) -> bool:
        """Whether a target of the same dtype receives the stored bytes unchanged."""
        return not (self.swap_bytes or self.computed)

    def native(self) -> Elements:
        """Return the same elements after their bytes were put into the order of this machine."""
        return replace(self, swap_bytes=0) if self.swap_bytes else self

    def without_math_bits(self) -> Elements:
        """Return the elements that the storage holds, neither conjugated nor negated."""
        return replace(self, math_bits=()) if self.math_bits else self


@cache
def elements_of(dtype: str) -> Elements:
    """Return elements of a dtype with which nothing is computed: one record for all tensors that have it."""
    return Elements(dtype=dtype)
