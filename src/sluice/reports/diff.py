"""The result of a comparison of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Literal

from sluice._messages import listed
from sluice._public import public
from sluice._units import counted, format_bytes, format_rate
from sluice.reports.document import Grid, Report, Section, Strong, checkpoint_title

__all__ = ["DiffReport", "DifferenceKind", "TensorDifference"]

#: ``only_a``, ``only_b``: the other checkpoint does not have the name. ``shape``, ``layout``: the values were not
#: compared; with ``layout`` only one is sparse or quantized, or they store different elements. ``dtype``, ``values``.
#: ``unsupported``: the values were not compared, because sluice does not read at least one of the tensors.
DifferenceKind = Literal["only_a", "only_b", "layout", "shape", "dtype", "values", "unsupported"]

#: How each kind is printed.
_KINDS: dict[DifferenceKind, str] = {
    "only_a": "only in a",
    "only_b": "only in b",
    "layout": "layout or stored elements",
    "shape": "shape",
    "dtype": "dtype",
    "values": "values",
    "unsupported": "not compared: sluice does not read it",
}


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs."""

    #: Its dotted name.
    name: str
    #: Kinds of difference.
    kinds: tuple[DifferenceKind, ...]
    #: Name of its dtype in the first checkpoint; None if that does not have the tensor.
    dtype_a: str | None = None
    #: Name of its dtype in the second.
    dtype_b: str | None = None
    #: Size of each dimension in the first, in elements.
    shape_a: tuple[int, ...] | None = None
    #: Size of each dimension in the second, in elements.
    shape_b: tuple[int, ...] | None = None
    #: For the first 100 names that only one has: the most similar name of the same shape that only the other has, or
    #: None.
    similar: str | None = None
    #: Number of elements compared.
    elements: int = 0
    #: Number of elements that differ.
    different: int = 0
    #: Number of elements that are NaN on one side only; the maxima ignore them.
    nan: int = 0
    #: Largest ``|a - b|``; infinite if one side is, and 0 of float4, whose bytes are compared.
    max_abs: float = 0.0
    #: Largest ``|a - b| / max(|a|, |b|)``.
    max_rel: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return every field as plain values; an infinite maximum is the text ``"inf"``, because JSON lacks it."""
        maxima = {name: getattr(self, name) for name in ("max_abs", "max_rel")}
        return asdict(self) | {name: value if isfinite(value) else "inf" for name, value in maxima.items()}

    def __str__(self) -> str:
        _, kinds, a, b, *amounts = _cells(self)
        values = "{} elements, at most {} apart, relative {}".format(*amounts) if amounts[0] else ""
        sides = (f"{label}: {side}" if side else "" for label, side in (("a", a), ("b", b)))
        return f"{self.name!r}: {'; '.join(filter(None, (kinds, *sides, values)))}"


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """The result of ``sluice.diff``."""

    _properties = ("same",)

    #: Path of the first checkpoint.
    a: str
    #: Path of the second checkpoint.
    b: str
    #: Name of the format of the first.
    format_a: str
    #: Name of the format of the second.
    format_b: str
    #: Dotted path of the compared part of the first; None for the whole checkpoint.
    key_a: str | None = None
    #: Dotted path of the compared part of the second; None for the whole checkpoint.
    key_b: str | None = None
    #: Number of tensor names in the compared part of the first.
    tensors_a: int
    #: Number of tensor names in the compared part of the second.
    tensors_b: int
    #: Number of these names of the first that were compared: they are common, or tied to a common one.
    compared_a: int
    #: Number of these names of the second that were compared.
    compared_b: int
    #: Number of tensors of the first outside the compared part.
    outside_a: int = 0
    #: Number of tensors of the second outside the compared part.
    outside_b: int = 0
    #: Tensors that differ: those of the first checkpoint in its order, then those that only the second has.
    differences: tuple[TensorDifference, ...]
    #: Number of names that both have.
    common: int
    #: Names that only one has, for tensors that it also has under a common name.
    tied: tuple[str, ...]
    #: Bytes of the compared tensors, both sides together.
    nbytes: int
    #: Seconds from the call to the report.
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def sections(self) -> Iterator[Section]:
        """Yield how many tensors were compared, both checkpoints, a table of differences, and the verdict."""
        yield Strong(
            f"compared {self.compared_a:,} of {counted(self.tensors_a + self.outside_a, 'tensor')} of a with "
            f"{self.compared_b:,} of {counted(self.tensors_b + self.outside_b, 'tensor')} of b"
        )
        yield _side("a", checkpoint_title(self.a, self.format_a, self.key_a), self.tensors_a, self.outside_a)
        yield _side("b", checkpoint_title(self.b, self.format_b, self.key_b), self.tensors_b, self.outside_b)
        rate = format_rate(self.nbytes, self.seconds)
        yield f"{counted(self.common, 'common name')}; compared {format_bytes(self.nbytes)} in {rate}"
        if self.tensors_a and self.tensors_b and not self.common:
            yield "no name is in both: key= and other_key= (--key-a, --key-b) choose the parts to compare"
        if self.tied:
            yield listed("tied to a common name", self.tied)
        if self.differences:
            headers = ("tensor", "difference", "a", "b", ">elements", ">max abs", ">max rel")
            yield Grid.first(headers, map(_cells, self.differences), len(self.differences))
        count = len(self.differences)
        yield Strong("the same" if self.same else counted(count, "tensor differs", "tensors differ"))


def _side(label: str, title: str, tensors: int, outside: int) -> str:
    """Return a line for one checkpoint, with the number of tensors in the compared part and outside it."""
    text = f"{label}: {title}: {counted(tensors, 'tensor')}"
    return f"{text}; {outside:,} outside this part were not compared" if outside else text


def _cells(difference: TensorDifference) -> tuple[str, ...]:
    sides = ((difference.dtype_a, difference.shape_a), (difference.dtype_b, difference.shape_b))
    described = ["" if dtype is None else f"{dtype} {list(shape or ())}" for dtype, shape in sides]
    kinds = ", ".join(_KINDS[kind] for kind in difference.kinds)
    similar = f"; similar: {difference.similar or repr('')}" if difference.similar is not None else ""
    amounts = ["", "", ""]
    if "values" in difference.kinds:
        nan = f", {difference.nan:,} NaN" if difference.nan else ""
        elements = f"{difference.different:,} of {difference.elements:,}{nan}"
        amounts = [elements, f"{difference.max_abs:.3g}", f"{difference.max_rel:.3g}"]
    return difference.name or "''", kinds + similar, *described, *amounts
