"""Error texts of mismatches: every problem in one error, readable for hundreds of them. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from sluice._errors import MismatchError
from sluice._near_names import nearest_names

__all__ = ["SHOWN", "Findings", "Shape", "first_names", "listed", "section", "type_of"]

#: Maximum number of lines shown for each kind of problem.
SHOWN = 20

#: Maximum number of names in a line that lists them.
_NAMES_SHOWN = 8

_ALLOW_EMPTY = (
    "some names may be missing, not all of them: pass key= (--key) or rename= (--rename), or allow_empty=True "
    "(--allow-empty) if the model may stay without them"
)

_IGNORE_MISMATCHED = (
    "load_into(..., ignore_mismatched=True) (--ignore-mismatched) keeps the module's own values of a different shape"
)

#: Size of each dimension, in elements.
Shape = tuple[int, ...]


class Findings(Struct, kw_only=True):
    """The problems of a checkpoint that does not fit a module."""

    #: Names of each missing tensor and its shape; None if it has no shape (extra state, lazy tensors).
    missing: list[tuple[tuple[str, ...], Shape | None]] = field(default_factory=list)
    #: Names of the checkpoint that the module does not have, and their shapes; None for extra state.
    unexpected: list[tuple[str, Shape | None]] = field(default_factory=list)
    #: Whether missing and unexpected names are problems.
    report_names: bool = True
    #: Number of tensors of the module if the checkpoint has none of them, which is a problem in any case; otherwise 0.
    none_of: int = 0
    #: Parts of the checkpoint to choose from if it has none of them, one line each.
    candidates: Sequence[str] = ()
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
        names = self.report_names or self.none_of > 0
        by_name = names and (self.missing or self.unexpected)
        if not (by_name or self.none_of or self.shapes or self.dtypes or self.others):
            return
        sections = [text for text in self._sections(names=names) if text]
        title, advice = "the checkpoint does not fit the module", []
        if self.none_of:
            title = f"{title}: it has 0 of {self.none_of:,} tensors"
            advice = [] if self.report_names else [_ALLOW_EMPTY]
        if self.shapes:
            advice.append(_IGNORE_MISMATCHED)
        raise MismatchError(
            "\n".join([title, *sections, *advice, "Nothing was read"]),
            missing=tuple(name for each, _ in self.missing for name in each) if names else (),
            unexpected=tuple(name for name, _ in self.unexpected) if names else (),
        )

    def _sections(self, *, names: bool) -> list[str]:
        missing, unexpected = (self.missing, self.unexpected) if names else ([], [])
        return [
            section("not in the checkpoint", self._describe_missing(missing[:SHOWN]), missing),
            section(
                "not in the module",
                [f"{_with_shape(repr(name), shape)}{self._origin(name)}" for name, shape in unexpected[:SHOWN]],
                unexpected,
            ),
            section("choose one with key= (--key)", self.candidates, self.candidates) if self.none_of else "",
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

    def _describe_missing(self, missing: Sequence[tuple[tuple[str, ...], Shape | None]]) -> list[str]:
        shapes = {names[0]: shape for names, shape in missing if shape is not None}
        nearest = nearest_names(shapes, self.unexpected)
        lines = []
        for names, shape in missing:
            text = _with_shape(" = ".join(map(repr, names)), shape)
            close = nearest.get(names[0])
            lines.append(text if close is None else f"{text}; the checkpoint has {close!r} of the same shape")
        return lines


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
