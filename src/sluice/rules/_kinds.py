"""The kinds of rules: what each does to entries. Pure: no data, no torch. ``sluice.rules`` says how they are used."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice._dtypes import ITEM_BYTES, why_no_cast
from sluice.entries.assembly import join, multiply, narrow, pad, permute, reshape, stack
from sluice.records import Entry
from sluice.rules._apply import EachRule, Rule, RuleFindings
from sluice.rules._patterns import NamePattern, compile_pattern, compile_template, expand, spell

__all__ = [
    "Cast",
    "Copy",
    "Drop",
    "Join",
    "Permute",
    "Rename",
    "Reshape",
    "Resize",
    "Scale",
    "Split",
    "Transpose",
]

#: Names of tensors that the text of a joined tensor lists; of more, the first and the last.
_NAMED = 4

#: Dtypes that torch multiplies by a real number and keeps.
_SCALABLE = frozenset({"float16", "bfloat16", "float32", "float64"})

#: What the elements of a dimension are called, by the number of dimensions and the dimension.
_DIMENSIONS = {(1, 0): "elements", (2, 0): "rows", (2, 1): "columns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change(EachRule):
    """A rule that makes one tensor of one tensor and keeps its name."""

    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:  # noqa: ARG002
        _check_dense(entry)
        changed, how = self._change(entry)
        return [(name, replace(changed, origin=f"{_origin(name, entry)}{how}"))]

    @abstractmethod
    def _change(self, entry: Entry) -> tuple[Entry, str]:
        """Return the changed entry and the words for what was done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename(EachRule):
    """See ``sluice.rules.rename``."""

    #: The new name.
    new: str

    def __post_init__(self) -> None:
        compile_template(self.new, compile_pattern(self.pattern))

    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
        return [(expand(found, self.new, self.pattern), replace(entry, origin=_origin(name, entry)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Rename):
    """See ``sluice.rules.copy``."""

    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
        copied = replace(entry, origin=_origin(name, entry))
        return [(name, entry), (expand(found, self.new, self.pattern), copied)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(EachRule):
    """See ``sluice.rules.drop``."""

    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:  # noqa: ARG002
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transpose(_Change):
    """See ``sluice.rules.transpose``."""

    #: One of the two dimensions.
    dim0: int
    #: The other one.
    dim1: int

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        order = list(range(len(entry.shape)))
        one, two = _dim(self.dim0, entry), _dim(self.dim1, entry)
        order[one], order[two] = two, one
        plain = {one, two} == {0, 1} and len(order) == 2
        return permute(entry, order), " transposed" if plain else f" transposed in dimensions {one} and {two}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permute(_Change):
    """See ``sluice.rules.permute``."""

    #: The old dimension at each place.
    dims: tuple[int, ...]

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        order = [_dim(dim, entry) for dim in self.dims]
        if sorted(order) != list(range(len(entry.shape))):
            raise ValueError(f"dims {list(self.dims)} are not all of the {len(entry.shape)} dimensions once")
        return permute(entry, order), f" permuted to {order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape(_Change):
    """See ``sluice.rules.reshape``."""

    #: The new shape; one size may be -1.
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ValueError(f"shape {list(self.shape)} must hold sizes, and -1 at most once")

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        changed = reshape(entry, self.shape)
        return changed, f" reshaped to {list(changed.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(_Change):
    """See ``sluice.rules.cast``."""

    #: Name of the finished dtype.
    dtype: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.dtype!r} is no dtype of a strided tensor")

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        reason = why_no_cast(entry.dtype, self.dtype, requires_grad=entry.requires_grad)
        if reason:
            raise ValueError(reason)
        return replace(entry, cast=self.dtype), f" cast to {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(_Change):
    """See ``sluice.rules.scale``."""

    #: What every element is multiplied by.
    factor: float

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        dtypes = {part.entry.dtype for part in entry.parts} or {entry.dtype}
        if not dtypes <= _SCALABLE:
            raise ValueError(f"{', '.join(sorted(dtypes))} cannot be multiplied: only {', '.join(sorted(_SCALABLE))}")
        return multiply(entry, self.factor), f" times {self.factor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(_Change):
    """See ``sluice.rules.resize``."""

    #: Size of the dimension afterwards.
    size: int
    #: The dimension.
    dim: int
    #: What new elements are.
    fill: float

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.size < 0:
            raise ValueError(f"a tensor cannot have {self.size} rows")

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        dim = _dim(self.dim, entry)
        what = f"{self.size} {_DIMENSIONS.get((len(entry.shape), dim), f'elements in dimension {dim}')}"
        if entry.shape[dim] >= self.size:
            return narrow(entry, dim, 0, self.size), f" cut to {what}"
        _check_constant(self.fill, entry.dtype)
        return pad(entry, dim, self.size, self.fill), f" padded with {self.fill:g} to {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(EachRule):
    """See ``sluice.rules.split``."""

    #: Name of each piece.
    into: tuple[str, ...]
    #: The dimension that is cut.
    dim: int
    #: Size of each piece in it; None for equal ones.
    sizes: tuple[int, ...] | None

    def __post_init__(self) -> None:
        pattern = compile_pattern(self.pattern)
        for new in self.into:
            compile_template(new, pattern)
        if not self.into or (self.sizes is not None and len(self.sizes) != len(self.into)):
            raise ValueError("split needs a name for each piece, and as many sizes as names")
        if self.sizes is not None and min(self.sizes) < 0:
            raise ValueError("sizes cannot be negative")

    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterator[tuple[str, Entry]]:
        _check_dense(entry)
        dim = _dim(self.dim, entry)
        whole, count = entry.shape[dim], len(self.into)
        sizes = (whole // count,) * count if self.sizes is None else self.sizes
        if sum(sizes) != whole:
            wanted = f"{count} equal sizes" if self.sizes is None else f"sizes {list(self.sizes)}"
            raise ValueError(f"{whole} elements in dimension {dim} of {list(entry.shape)} do not split into {wanted}")
        start = 0
        for new, size in zip(self.into, sizes, strict=True):
            what = _DIMENSIONS.get((len(entry.shape), dim), f"dimension {dim},")
            origin = f"{_origin(name, entry)}, {what} {start}:{start + size}"
            yield expand(found, new, self.pattern), replace(narrow(entry, dim, start, size), origin=origin)
            start += size


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Rule):
    """See ``sluice.rules.concatenate`` and ``sluice.rules.stack``."""

    #: Names of the tensors in their order: several patterns, or one that holds a ``#``.
    patterns: tuple[NamePattern, ...]
    #: Name of the whole.
    into: str
    #: The dimension along which they lie.
    dim: int
    #: Whether that is a new one.
    new_dim: bool

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            compile_template(self.into, compile_pattern(pattern, numbered=True))
        if not self.patterns:
            raise ValueError("there is nothing to join: name the tensors")

    def __str__(self) -> str:
        return f"{'stack' if self.new_dim else 'concatenate'}({', '.join(map(spell, self.patterns))})"

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries with each group of matching ones as one, where the first of them was."""
        findings = RuleFindings(self)
        groups, used = self._groups(entries, findings)
        findings.matched = bool(groups)
        made: dict[str, Entry] = {}
        whole_at = {min(members.values(), key=used.__getitem__): new for new, members in groups.items()}
        for name, entry in entries.items():
            if name not in used:
                findings.add(made, name, entry, name)
            elif name in whole_at:
                self._add_whole(made, whole_at[name], groups[whole_at[name]], entries, findings)
        findings.raise_if_any(entries)
        return made

    def _groups(
        self, entries: Iterable[str], findings: RuleFindings
    ) -> tuple[dict[str, dict[tuple[int, int], str]], dict[str, int]]:
        """Return the members of each whole by pattern and number, and the position of each name that is used."""
        compiled = [compile_pattern(pattern, numbered=True) for pattern in self.patterns]
        groups: dict[str, dict[tuple[int, int], str]] = {}
        used: dict[str, int] = {}
        for position, name in enumerate(entries):
            for order, pattern in enumerate(compiled):
                found = pattern.regex.fullmatch(name)
                if found is None:
                    continue
                new = expand(found, self.into, self.patterns[order])
                number = int(found[pattern.number]) if pattern.number else 0
                members = groups.setdefault(new, {})
                if (order, number) in members or name in used:
                    findings.refuse(name, "its name matches twice")
                members[order, number] = name
                used[name] = position
        return groups, used

    def _add_whole(
        self,
        made: dict[str, Entry],
        new: str,
        members: Mapping[tuple[int, int], str],
        entries: Mapping[str, Entry],
        findings: RuleFindings,
    ) -> None:
        orders = sorted(members)
        for order, pattern in enumerate(self.patterns):
            numbers = [number for place, number in orders if place == order]
            if numbers != list(range(len(numbers))) or not numbers:
                missing = min(set(range(len(numbers) + 1)) - set(numbers))
                what = f"number {missing} of {spell(pattern)}" if numbers else f"none for {spell(pattern)}"
                findings.refuse(new, f"a tensor is missing: {what}")
                return
        names = [members[place] for place in orders]
        parts = [entries[name] for name in names]
        try:
            for part in parts:
                _check_dense(part)
            dim = _dim(self.dim, parts[0], extra=int(self.new_dim))
            whole = (stack if self.new_dim else join)(parts, dim)
        except ValueError as error:
            findings.refuse(new, str(error))
            return
        origins = [_origin(name, part) for name, part in zip(names, parts, strict=True)]
        what = "stack" if self.new_dim else "concatenation"
        findings.add(made, new, replace(whole, origin=f"{what} of ({_listed(origins)}) in dimension {dim}"), names[0])


def _listed(origins: Sequence[str]) -> str:
    if len(origins) <= _NAMED:
        return "; ".join(origins)
    return f"{origins[0]}; {origins[1]}; ... {len(origins) - 3} more ...; {origins[-1]}"


def _check_dense(entry: Entry) -> None:
    if entry.composite is not None:
        raise ValueError(f"it is a {entry.layout} tensor: only dense ones can be changed while they are read")


def _dim(dim: int, entry: Entry, *, extra: int = 0) -> int:
    """Return a dimension counted from the front, with ``extra`` more dimensions than the entry has."""
    rank = len(entry.shape) + extra
    if not -rank <= dim < rank:
        raise ValueError(f"it has no dimension {dim}: its shape is {list(entry.shape)}")
    return dim % rank


def _check_constant(value: float, dtype: str) -> None:
    """Raise where a dtype cannot hold a constant as it is."""
    if dtype == "bool":
        lowest, highest = 0, 1
    elif "int" in dtype:
        bits = 8 * ITEM_BYTES[dtype]
        lowest, highest = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    elif dtype.startswith("complex") or "x2" in dtype:
        lowest = highest = 0
    else:
        return
    if int(value) != value or not lowest <= value <= min(highest, 2**63 - 1):
        raise ValueError(f"{dtype} cannot hold {value}")


def _origin(name: str, entry: Entry) -> str:
    """Return what a tensor was made of so far."""
    return entry.origin or name
