"""The text of a mismatch: every problem in one error, readable when there are hundreds. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from sluice._errors import MismatchError

__all__ = ["SHOWN", "Findings", "closest", "section"]

#: Lines shown of each kind of problem.
SHOWN = 20

#: Names compared to find the closest one: comparing is quadratic in the length of the names.
_COMPARED = 200

Shape = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Findings:
    """Every reason why a checkpoint does not fit a module."""

    #: Names that one missing tensor has, and its shape; None where it has none (extra state, lazy tensors).
    missing: list[tuple[tuple[str, ...], Shape | None]] = field(default_factory=list)
    #: Names of the checkpoint that the module does not have, and their shapes; None for extra state.
    spare: list[tuple[str, Shape | None]] = field(default_factory=list)
    #: Whether names that the module does not have are a problem; they serve as suggestions in any case.
    report_spare: bool = True
    #: Name, shape in the module, shape in the checkpoint.
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    #: Name, reason.
    dtypes: list[tuple[str, str]] = field(default_factory=list)
    #: Any other sentence.
    others: list[str] = field(default_factory=list)
    #: What rules made a tensor of the checkpoint of, by its name.
    origins: Mapping[str, str] = field(default_factory=dict)

    def raise_if_any(self) -> None:
        """Raise when there is a problem.

        Raises:
            MismatchError: It lists all of them.
        """
        sections = [text for text in self._sections() if text]
        if sections:
            raise MismatchError(
                "\n".join(["the checkpoint does not fit the module", *sections, "Nothing was read"]),
                missing=tuple(name for names, _ in self.missing for name in names),
                unexpected=tuple(name for name, _ in self.spare) if self.report_spare else (),
            )

    def _sections(self) -> list[str]:
        spare = self.spare if self.report_spare else []
        return [
            section(
                "not in the checkpoint", [self._describe_missing(*one) for one in self.missing[:SHOWN]], self.missing
            ),
            section(
                "not in the module",
                [f"{_with_shape(repr(name), shape)}{self._made_of(name)}" for name, shape in spare[:SHOWN]],
                spare,
            ),
            section(
                "of another shape",
                [f"{_describe_shapes(*one)}{self._made_of(one[0])}" for one in self.shapes[:SHOWN]],
                self.shapes,
            ),
            section(
                "of a dtype that does not fit",
                [f"{name!r}: {why}{self._made_of(name)}" for name, why in self.dtypes[:SHOWN]],
                self.dtypes,
            ),
            section("cannot be loaded", self.others[:SHOWN], self.others),
        ]

    def _made_of(self, name: str) -> str:
        return f"; rules made it of {self.origins[name]!r}" if name in self.origins else ""

    def _describe_missing(self, names: tuple[str, ...], shape: Shape | None) -> str:
        text = _with_shape(" = ".join(map(repr, names)), shape)
        if shape is None:
            return text
        close = closest(names[0], [name for name, found in self.spare if found == shape])
        return f"{text}; the checkpoint has {close!r} of the same shape" if close else text


def section(title: str, lines: Sequence[str], of: Sequence[object]) -> str:
    """Return a titled list, empty when ``of`` is: the lines describe the first of ``of``, the rest is counted."""
    if not of:
        return ""
    more = [f"    and {len(of) - len(lines)} more"] if len(of) > len(lines) else []
    return "\n".join([f"  {title} ({len(of)}):", *(f"    {line}" for line in lines), *more])


def _with_shape(text: str, shape: Shape | None) -> str:
    return text if shape is None else f"{text} {list(shape)}"


def _describe_shapes(name: str, own: Shape, found: Shape) -> str:
    return f"{name!r} is {list(own)} in the module, {list(found)} in the checkpoint"


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate most like ``name``, or None when there is no candidate."""
    matcher = SequenceMatcher(b=name, autojunk=False)

    def similarity(candidate: str) -> float:
        matcher.set_seq1(candidate)
        return matcher.ratio()

    return max(candidates[:_COMPARED], key=similarity, default=None)
