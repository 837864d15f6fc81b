"""Stored form of elements, and elementwise computations between file and target.

Every record that describes elements (``Entry``, ``Fill``, ``Copy``, ``Constant``) holds one ``Elements``. A new
elementwise property is a field here and a computation in ``sluice.engine.host_copies``.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["Elements", "MathBit", "RowKernel", "elements_of"]

#: Lazy operations that torch records as bits of a tensor: conjugate and negative of its storage.
MathBit = Literal["conj", "neg"]


class RowKernel(Struct, frozen=True, kw_only=True):
    """A computation on whole rows, the first dimension of a fill.

    The result for a row depends only on this row and its position, so that any number of rows can be computed at once.
    """

    #: Name of the function; see ``sluice.engine.row_kernels``.
    name: str
    #: Elements of one finished row, which are contiguous in the target.
    row_elements: int


class Elements(Struct, frozen=True, kw_only=True):
    """Stored form of elements, and the computations on each element, in the order of the fields."""

    #: Name of the dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Bytes of each big-endian real number; 0 for little-endian numbers.
    swap_bytes: int = 0
    #: Conjugation or negation of the stored elements.
    math_bits: tuple[MathBit, ...] = ()
    #: Factors by which each element is multiplied in sequence, in ``dtype``.
    factors: tuple[float, ...] = ()
    #: Computation on whole rows, or None.
    kernel: RowKernel | None = None

    @property
    def computed(self) -> bool:
        """Whether there is a computation other than a change of byte order or a cast."""
        return bool(self.math_bits or self.factors or self.kernel)

    @property
    def verbatim(self) -> bool:
        """Whether a target of the same dtype receives the stored bytes unchanged."""
        return not (self.swap_bytes or self.computed)

    def native(self) -> Elements:
        """Return the same elements in native byte order."""
        return replace(self, swap_bytes=0) if self.swap_bytes else self

    def without_math_bits(self) -> Elements:
        """Return the elements of the storage, neither conjugated nor negated."""
        return replace(self, math_bits=()) if self.math_bits else self


@cache
def elements_of(dtype: str) -> Elements:
    """Return little-endian elements of a dtype without computations: one shared record per dtype."""
    return Elements(dtype=dtype)
