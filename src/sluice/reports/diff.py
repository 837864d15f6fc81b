"""What a comparison of two checkpoints found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Literal

from sluice._messages import SHOWN, section
from sluice._units import format_bytes

__all__ = ["DiffReport", "DifferenceKind", "TensorDifference"]

#: ``only_a``, ``only_b``: the other checkpoint has no such name. ``shape``, ``layout``: the values were not compared;
#: with ``layout`` one is sparse or quantized and the other not, or they store other elements. ``dtype``, ``values``.
#: ``unsupported``: at least one is of a kind that sluice does not read, so that nobody knows.
DifferenceKind = Literal["only_a", "only_b", "layout", "shape", "dtype", "values", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs."""

    #: Its dotted name.
    name: str
    #: In what it differs.
    kinds: tuple[DifferenceKind, ...]
    #: Name of its dtype in the first checkpoint; None where that has no such tensor.
    dtype_a: str | None = None
    #: Name of its dtype in the second.
    dtype_b: str | None = None
    #: Size of each dimension in the first, in elements.
    shape_a: tuple[int, ...] | None = None
    #: Size of each dimension in the second, in elements.
    shape_b: tuple[int, ...] | None = None
    #: For a name that one of them lacks: the closest name that only the other has, of the same shape.
    similar: str | None = None
    #: Number of elements that were compared.
    elements: int = 0
    #: Those of them that differ.
    different: int = 0
    #: Those of them that are NaN on one side only; the maxima leave them out.
    nan: int = 0
    #: Largest ``|a - b|``; infinite where one side is.
    max_abs: float = 0.0
    #: Largest ``|a - b| / max(|a|, |b|)``.
    max_rel: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return every field as plain values; an infinite maximum is the text ``"inf"``: JSON has no number for it."""
        maxima = {name: getattr(self, name) for name in ("max_abs", "max_rel")}
        return asdict(self) | {name: value if isfinite(value) else "inf" for name, value in maxima.items()}

    def __str__(self) -> str:
        if "only_a" in self.kinds or "only_b" in self.kinds:
            own, other = ("first", "second") if "only_a" in self.kinds else ("second", "first")
            close = f"; the {other} has {self.similar!r} of the same shape" if self.similar else ""
            return f"{self.name!r} {list(self.shape_a or self.shape_b or ())} is in the {own} only{close}"
        if "unsupported" in self.kinds:
            return f"{self.name!r} was not compared: sluice does not read it"
        parts = []
        if "shape" in self.kinds:
            parts.append(f"shape {list(self.shape_a or ())} and {list(self.shape_b or ())}")
        if "layout" in self.kinds:
            parts.append("another layout, or other elements are stored")
        if "dtype" in self.kinds:
            parts.append(f"dtype {self.dtype_a} and {self.dtype_b}")
        if "values" in self.kinds:
            nan = f", {self.nan} of them NaN on one side" if self.nan else ""
            parts.append(
                f"{self.different} of {self.elements} elements{nan}, at most {self.max_abs:.3g} apart, "
                f"relative {self.max_rel:.3g}"
            )
        return f"{self.name!r}: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What ``sluice.diff`` found."""

    #: The first checkpoint.
    a: str
    #: The second.
    b: str
    #: Name of the first one's format.
    format_a: str
    #: Name of the second one's format.
    format_b: str
    #: The tensors that differ: those of the first in its order, then those that only the second has.
    differences: tuple[TensorDifference, ...]
    #: Number of names that both have.
    common: int
    #: Names that one of them lacks, but has the same tensor under another name.
    tied: tuple[str, ...]
    #: Bytes of tensors that were compared, both sides together.
    nbytes: int
    #: Seconds from the call to the report.
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, object]:
        """Return every field and ``same`` as plain values that ``json.dumps`` takes."""
        return {"same": self.same, **asdict(self), "differences": [one.to_json() for one in self.differences]}

    def __str__(self) -> str:
        speed = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        what = "the same" if self.same else "different"
        lines = [
            f"{self.a} ({self.format_a}) and {self.b} ({self.format_b}): {what}, {self.common} common names",
            f"  {format_bytes(self.nbytes)} in {self.seconds:.2f} s, {speed:.2f} GB/s",
            section("differences", [str(one) for one in self.differences[:SHOWN]], self.differences),
        ]
        return "\n".join(line for line in lines if line)
