"""Stored form of elements, and elementwise computations between file and target.

Every record that describes elements (``Entry``, ``Fill``, ``Copy``, ``Constant``) holds one ``Elements``. A new
elementwise property is a field here and a computation in ``sluice.engine.host_copies``.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES

__all__ = ["Arithmetic", "Elements", "MathBit", "Packing", "elements_of"]

#: Lazy operations that torch records as bits of a tensor: conjugate and negative of its storage.
MathBit = Literal["conj", "neg"]

#: Operations of an element with a number, as methods of tensors.
Arithmetic = Literal["mul", "add"]


class Packing(Struct, frozen=True, kw_only=True):
    """A code of packs: fixed numbers of consecutive elements that are stored together and decoded together.

    The shape and the strides of a packed ``Entry`` count elements. Those of a packed ``Fill`` or ``Copy`` count packs
    on the side of the file, and elements on the side of the target.
    """

    #: Name of the code: ``"Q4_0"``; see ``sluice.engine.packs``.
    name: str
    #: Elements of one pack.
    elements: int
    #: Bytes of one pack.
    nbytes: int
    #: Step of the elements of a pack in the target of a fill, in elements.
    target_step: int = 1


class Elements(Struct, frozen=True, kw_only=True):
    """Stored form of elements, and the computations on each element, in the order of the fields."""

    #: Name of the dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Bytes of each big-endian real number; 0 for little-endian numbers.
    swap_bytes: int = 0
    #: Conjugation or negation of the stored elements.
    math_bits: tuple[MathBit, ...] = ()
    #: The code that packs are decoded from, to ``dtype``; None if each element is stored by itself.
    packing: Packing | None = None
    #: Products and sums of each element with a number in sequence, in ``dtype``.
    arithmetic: tuple[tuple[Arithmetic, float], ...] = ()

    @property
    def computed(self) -> bool:
        """Whether there is a computation other than a change of byte order or a cast."""
        return bool(self.math_bits or self.arithmetic or self.packing)

    @property
    def verbatim(self) -> bool:
        """Whether a target of the same dtype receives the stored bytes unchanged."""
        return not (self.swap_bytes or self.computed)

    @property
    def view_bits(self) -> tuple[MathBit, ...]:
        """The conjugation or negation, if nothing follows it: a view of what is stored can have it instead."""
        return () if self.arithmetic else self.math_bits

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored element, or of one pack."""
        return ITEM_BYTES[self.dtype] if self.packing is None else self.packing.nbytes


@cache
def elements_of(dtype: str) -> Elements:
    """Return little-endian elements of a dtype without computations: one shared record per dtype."""
    return Elements(dtype=dtype)
