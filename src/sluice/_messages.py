"""Error texts of mismatches: every problem in one error, readable for hundreds of them. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from msgspec import Struct, field

from sluice._errors import MismatchError

__all__ = ["SHOWN", "Findings", "closest", "first_names", "listed", "section", "type_of"]

#: Maximum number of lines shown for each kind of problem.
SHOWN = 20

#: Maximum number of names in a line that lists them.
_NAMES_SHOWN = 8

#: Maximum number of names compared to find the closest one: a comparison is quadratic in the length of the names.
_COMPARED = 200

Shape = tuple[int, ...]


class Findings(Struct, kw_only=True):
    """The problems of a checkpoint that does not fit a module."""

    #: Names of each missing tensor and its shape; None if it has no shape (extra state, lazy tensors).
    missing: list[tuple[tuple[str, ...], Shape | None]] = field(default_factory=list)
    #: Names of the checkpoint that the module does not have, and their shapes; None for extra state.
    unexpected: list[tuple[str, Shape | None]] = field(default_factory=list)
    #: Whether unexpected names are problems; they are suggestions for missing names in any case.
    report_unexpected: bool = True
    #: Name, shape in the module, shape in the checkpoint.
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    #: Name, reason.
    dtypes: list[tuple[str, str]] = field(default_factory=list)
    #: Other problems, one sentence each.
    others: list[str] = field(default_factory=list)
    #: Description of the origin of each tensor that rules changed, by its name.
    origins: Mapping[str, str] = field(default_factory=dict)

    def raise_if_any(self) -> None:
        """Raise an error if there is a problem.

        Raises:
            MismatchError: It lists all of them.
        """
        sections = [text for text in self._sections() if text]
        if sections:
            raise MismatchError(
                "\n".join(["the checkpoint does not fit the module", *sections, "Nothing was read"]),
                missing=tuple(name for names, _ in self.missing for name in names),
                unexpected=tuple(name for name, _ in self.unexpected) if self.report_unexpected else (),
            )

    def _sections(self) -> list[str]:
        unexpected = self.unexpected if self.report_unexpected else []
        return [
            section(
                "not in the checkpoint", [self._describe_missing(*each) for each in self.missing[:SHOWN]], self.missing
            ),
            section(
                "not in the module",
                [f"{_with_shape(repr(name), shape)}{self._origin(name)}" for name, shape in unexpected[:SHOWN]],
                unexpected,
            ),
            section(
                "of a different shape",
                [f"{_describe_shapes(*each)}{self._origin(each[0])}" for each in self.shapes[:SHOWN]],
                self.shapes,
            ),
            section(
                "of an incompatible dtype",
                [f"{name!r}: {why}{self._origin(name)}" for name, why in self.dtypes[:SHOWN]],
                self.dtypes,
            ),
            section("cannot be loaded", self.others[:SHOWN], self.others),
        ]

    def _origin(self, name: str) -> str:
        return f"; produced by rules from {self.origins[name]!r}" if name in self.origins else ""

    def _describe_missing(self, names: tuple[str, ...], shape: Shape | None) -> str:
        text = _with_shape(" = ".join(map(repr, names)), shape)
        if shape is None:
            return text
        close = closest(names[0], [name for name, other in self.unexpected if other == shape])
        return f"{text}; the checkpoint has {close!r} of the same shape" if close else text


def type_of(value: object) -> str:
    """Return the type of a wrong argument with its article: ``"an int"``; classes say that they are classes."""
    if value is None or isinstance(value, bytes):
        return "None" if value is None else "bytes"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def section(title: str, lines: Sequence[str], of: Sequence[object]) -> str:
    """Return a titled list: ``lines`` for the first of ``of``, and the number of the others; empty if ``of`` is."""
    if not of:
        return ""
    more = [f"    and {len(of) - len(lines)} more"] if len(of) > len(lines) else []
    return "\n".join([f"  {title} ({len(of)}):", *(f"    {line}" for line in lines), *more])


def listed(label: str, names: Sequence[str]) -> str:
    """Return a line that counts names and lists the first of them: ``"missing (9): a, b, c and 6 more"``."""
    return f"{label} ({len(names):,}): {first_names(names)}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names as text: ``"a, b, c and 6 more"``."""
    first = ", ".join(name or "''" for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return f"{first}{more}"


def _with_shape(text: str, shape: Shape | None) -> str:
    return text if shape is None else f"{text} {list(shape)}"


def _describe_shapes(name: str, own: Shape, saved: Shape) -> str:
    return f"{name!r} is {list(own)} in the module, {list(saved)} in the checkpoint"


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate most similar to ``name``, or None if there is none."""
    matcher = SequenceMatcher(b=name, autojunk=False)

    def similarity(candidate: str) -> float:
        matcher.set_seq1(candidate)
        return matcher.ratio()

    return max(candidates[:_COMPARED], key=similarity, default=None)
