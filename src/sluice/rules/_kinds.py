"""The kinds of rules and their effects on entries. Pure: no data, no torch. Users make them in ``sluice.rules``."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, why_no_cast
from sluice.entries.assembly import compute, join, narrow, pad, permute, reshape, stack
from sluice.entries.patterns import NamePattern, compile_pattern, compile_template, expand, spell
from sluice.entries.rules import EachRule, Rule, RuleFindings
from sluice.records import Arithmetic, Entry

__all__ = [
    "ArithmeticRule",
    "CastRule",
    "CopyRule",
    "DropRule",
    "JoinRule",
    "PermuteRule",
    "RenameRule",
    "ReshapeRule",
    "ResizeRule",
    "SplitRule",
    "TransposeRule",
]

#: Maximum number of names in the description of a joined tensor; of more, the first two and the last are shown.
_NAMED = 4

#: Dtypes that torch multiplies by a real number, or adds it to, and keeps.
_COMPUTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Words for the elements of a dimension, by number of dimensions and dimension.
_DIMENSIONS = {(1, 0): "elements", (2, 0): "rows", (2, 1): "columns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangeRule(EachRule):
    """A rule that changes one tensor at a time and keeps its name."""

    def _results(self, name: str, matched: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:  # noqa: ARG002
        _check_dense(entry)
        changed, how = self._change(entry)
        return [(name, replace(changed, origin=f"{_origin(name, entry)}{how}"))]

    @abstractmethod
    def _change(self, entry: Entry) -> tuple[Entry, str]:
        """Return the changed entry and a description of the change, which follows the name of the tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameRule(EachRule):
    """See ``sluice.rules.rename``."""

    #: The new name.
    new: str

    def __post_init__(self) -> None:
        compile_template(self.new, compile_pattern(self.pattern))

    def _results(self, name: str, matched: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
        return [(expand(matched, self.new, self.pattern), replace(entry, origin=_origin(name, entry)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRule(RenameRule):
    """See ``sluice.rules.copy``."""

    def _results(self, name: str, matched: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
        copied = replace(entry, origin=_origin(name, entry))
        return [(name, entry), (expand(matched, self.new, self.pattern), copied)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRule(EachRule):
    """See ``sluice.rules.drop``."""

    def _results(self, name: str, matched: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:  # noqa: ARG002
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposeRule(_ChangeRule):
    """See ``sluice.rules.transpose``."""

    #: First dimension.
    dim0: int
    #: Second dimension.
    dim1: int

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        order = list(range(len(entry.shape)))
        first, second = _dim(self.dim0, entry), _dim(self.dim1, entry)
        order[first], order[second] = second, first
        plain = {first, second} == {0, 1} and len(order) == 2
        return permute(entry, order), " transposed" if plain else f" transposed in dimensions {first} and {second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteRule(_ChangeRule):
    """See ``sluice.rules.permute``."""

    #: Old dimension at each position.
    dims: tuple[int, ...]

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        order = [_dim(dim, entry) for dim in self.dims]
        if sorted(order) != list(range(len(entry.shape))):
            raise ValueError(f"dims {list(self.dims)} must name each of the {len(entry.shape)} dimensions once")
        return permute(entry, order), f" permuted to {order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeRule(_ChangeRule):
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
class CastRule(_ChangeRule):
    """See ``sluice.rules.cast``."""

    #: Name of the finished dtype.
    dtype: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.dtype!r} is not a dtype of strided tensors")

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        reason = why_no_cast(entry.dtype, self.dtype, requires_grad=entry.requires_grad)
        if reason:
            raise ValueError(reason)
        return replace(entry, cast=self.dtype), f" cast to {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticRule(_ChangeRule):
    """See ``sluice.rules.scale`` and ``sluice.rules.add``."""

    #: Operation of every element with the number.
    operation: Arithmetic
    #: The number.
    number: float

    def __str__(self) -> str:
        return f"{'scale' if self.operation == 'mul' else 'add'}({spell(self.pattern)})"

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        dtypes = {part.entry.dtype for part in entry.parts} or {entry.dtype}
        if not dtypes <= _COMPUTABLE:
            how = "multiplied" if self.operation == "mul" else "added to"
            raise ValueError(f"{', '.join(sorted(dtypes))} cannot be {how}: only {', '.join(sorted(_COMPUTABLE))}")
        sign = "times" if self.operation == "mul" else "plus"
        return compute(entry, self.operation, self.number), f" {sign} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRule(_ChangeRule):
    """See ``sluice.rules.resize``."""

    #: Size of the dimension afterwards.
    size: int
    #: The dimension.
    dim: int
    #: Value of new elements.
    fill: float

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        if self.size < 0:
            raise ValueError(f"a tensor cannot have {self.size} rows")

    def _change(self, entry: Entry) -> tuple[Entry, str]:
        dim = _dim(self.dim, entry)
        extent = f"{self.size} {_DIMENSIONS.get((len(entry.shape), dim), f'elements in dimension {dim}')}"
        if entry.shape[dim] >= self.size:
            return narrow(entry, dim, 0, self.size), f" cut to {extent}"
        _check_constant(self.fill, entry.dtype)
        return pad(entry, dim, self.size, self.fill), f" padded with {self.fill:g} to {extent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule(EachRule):
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
            raise ValueError("split needs a name for each piece, and a size for each name if sizes are given")
        if self.sizes is not None and min(self.sizes) < 0:
            raise ValueError("sizes cannot be negative")

    def _results(self, name: str, matched: re.Match[str], entry: Entry) -> Iterator[tuple[str, Entry]]:
        _check_dense(entry)
        dim = _dim(self.dim, entry)
        whole, count = entry.shape[dim], len(self.into)
        sizes = (whole // count,) * count if self.sizes is None else self.sizes
        if sum(sizes) != whole:
            expected = f"{count} equal sizes" if self.sizes is None else f"sizes {list(self.sizes)}"
            raise ValueError(f"{whole} elements in dimension {dim} of {list(entry.shape)} do not split into {expected}")
        start = 0
        for new, size in zip(self.into, sizes, strict=True):
            unit = _DIMENSIONS.get((len(entry.shape), dim), f"dimension {dim},")
            origin = f"{_origin(name, entry)}, {unit} {start}:{start + size}"
            yield expand(matched, new, self.pattern), replace(narrow(entry, dim, start, size), origin=origin)
            start += size


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRule(Rule):
    """See ``sluice.rules.concatenate`` and ``sluice.rules.stack``."""

    #: Names of the tensors in order: several patterns, or one with a ``#``.
    patterns: tuple[NamePattern, ...]
    #: Name of the result.
    into: str
    #: Dimension along which they are joined.
    dim: int
    #: Whether that is a new dimension.
    new_dim: bool

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            compile_template(self.into, compile_pattern(pattern, numbered=True))
        if not self.patterns:
            raise ValueError("concatenate and stack need at least one pattern")

    def __str__(self) -> str:
        return f"{'stack' if self.new_dim else 'concatenate'}({', '.join(map(spell, self.patterns))})"

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries with each group of matching entries joined, in the place of the first of them."""
        findings = RuleFindings(self)
        groups, used = self._groups(entries, findings)
        findings.matched = bool(groups)
        result: dict[str, Entry] = {}
        whole_at = {min(members.values(), key=used.__getitem__): new for new, members in groups.items()}
        for name, entry in entries.items():
            if name not in used:
                findings.add(result, name, entry, name)
            elif name in whole_at:
                self._add_whole(result, whole_at[name], groups[whole_at[name]], entries, findings)
        findings.raise_if_any(entries)
        return result

    def _groups(
        self, entries: Iterable[str], findings: RuleFindings
    ) -> tuple[dict[str, dict[tuple[int, int], str]], dict[str, int]]:
        """Return the members of each result by pattern and number, and the position of each name that is used."""
        compiled = [compile_pattern(pattern, numbered=True) for pattern in self.patterns]
        groups: dict[str, dict[tuple[int, int], str]] = {}
        used: dict[str, int] = {}
        for position, name in enumerate(entries):
            for order, pattern in enumerate(compiled):
                matched = pattern.regex.fullmatch(name)
                if matched is None:
                    continue
                new = expand(matched, self.into, self.patterns[order])
                number = int(matched[pattern.number]) if pattern.number else 0
                members = groups.setdefault(new, {})
                if (order, number) in members or name in used:
                    findings.refuse(name, "its name matches twice")
                members[order, number] = name
                used[name] = position
        return groups, used

    def _add_whole(
        self,
        result: dict[str, Entry],
        new: str,
        members: Mapping[tuple[int, int], str],
        entries: Mapping[str, Entry],
        findings: RuleFindings,
    ) -> None:
        orders = sorted(members)
        for order, pattern in enumerate(self.patterns):
            numbers = [number for position, number in orders if position == order]
            if numbers != list(range(len(numbers))) or not numbers:
                missing = min(set(range(len(numbers) + 1)) - set(numbers))
                absent = f"number {missing} of {spell(pattern)}" if numbers else f"no name matches {spell(pattern)}"
                findings.refuse(new, f"a tensor is missing: {absent}")
                return
        names = [members[order] for order in orders]
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
        kind = "stack" if self.new_dim else "concatenation"
        findings.add(result, new, replace(whole, origin=f"{kind} of ({_listed(origins)}) in dimension {dim}"), names[0])


def _listed(origins: Sequence[str]) -> str:
    if len(origins) <= _NAMED:
        return "; ".join(origins)
    return f"{origins[0]}; {origins[1]}; ... {len(origins) - 3} more ...; {origins[-1]}"


def _check_dense(entry: Entry) -> None:
    if entry.composite is not None:
        raise ValueError(f"it is a {entry.layout} tensor: rules can change only dense tensors")


def _dim(dim: int, entry: Entry, *, extra: int = 0) -> int:
    """Return a non-negative dimension; ``extra`` is the number of new dimensions."""
    rank = len(entry.shape) + extra
    if not -rank <= dim < rank:
        raise ValueError(f"it has no dimension {dim}: its shape is {list(entry.shape)}")
    return dim % rank


def _check_constant(value: float, dtype: str) -> None:
    """Raise if a dtype cannot hold a constant exactly."""
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
    """Return the description of the changes to a tensor so far, which starts as its name."""
    return entry.origin or name
