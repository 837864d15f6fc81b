"""The kinds of rules and their effects on entries. Pure: no data, no torch. Users make them in ``sluice.rules``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, why_no_cast
from sluice.entries.assembly import compute, join, narrow, pad, permute, reshape, stack
from sluice.entries.patterns import NamePattern, compile_pattern, compile_template, expand, spell
from sluice.entries.rules import EachRule, Rule, RuleFindings
from sluice.records import Arithmetic, Entry

__all__ = [
    "JoinRule",
    "changing",
    "computed",
    "dropped",
    "permuted",
    "renaming",
    "reshaped",
    "resized",
    "split",
    "transposed",
    "with_cast",
]

#: Maximum number of names in the description of a joined tensor; of more, the first two and the last are shown.
_NAMED = 4

#: Dtypes that torch multiplies by a real number, or adds it to, and keeps.
_COMPUTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Words for the elements of a dimension, by number of dimensions and dimension.
_DIMENSIONS = {(1, 0): "elements", (2, 0): "rows", (2, 1): "columns"}


def changing(
    kind: str, pattern: NamePattern, change: Callable[..., tuple[Entry, str]], *arguments: object, optional: bool
) -> Rule:
    """Return a rule that changes one tensor at a time and keeps its name.

    Args:
        kind: Name of the public function.
        pattern: Names of the tensors.
        change: Returns the changed entry and a description of the change, which follows the name of the tensor.
        arguments: Its arguments before the entry.
        optional: Whether it may match nothing.
    """
    return EachRule(kind=kind, pattern=pattern, effect=_changed, arguments=(change, *arguments), optional=optional)


def _changed(change: Callable[..., tuple[Entry, str]], *arguments: Any) -> Iterable[tuple[str, Entry]]:
    *own, name, _, entry = arguments
    _check_dense(entry)
    changed, how = change(*own, entry)
    return [(name, replace(changed, origin=f"{_origin(name, entry)}{how}"))]


def renaming(pattern: NamePattern, new: str, *, copy: bool, optional: bool) -> Rule:
    """See ``sluice.rules.rename`` and ``sluice.rules.copy``."""
    compile_template(new, compile_pattern(pattern))
    kind, effect = ("copy", _copied) if copy else ("rename", _renamed)
    return EachRule(kind=kind, pattern=pattern, effect=effect, arguments=(new, pattern), optional=optional)


def _renamed(
    new: str, pattern: NamePattern, name: str, matched: re.Match[str], entry: Entry
) -> list[tuple[str, Entry]]:
    return [(expand(matched, new, pattern), replace(entry, origin=_origin(name, entry)))]


def _copied(new: str, pattern: NamePattern, name: str, matched: re.Match[str], entry: Entry) -> list[tuple[str, Entry]]:
    return [(name, entry), *_renamed(new, pattern, name, matched, entry)]


def dropped(name: str, matched: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
    """See ``sluice.rules.drop``."""
    del name, matched, entry
    return ()


def transposed(dim0: int, dim1: int, entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.transpose``."""
    order = list(range(len(entry.shape)))
    first, second = _dim(dim0, entry), _dim(dim1, entry)
    order[first], order[second] = second, first
    plain = {first, second} == {0, 1} and len(order) == 2
    return permute(entry, order), " transposed" if plain else f" transposed in dimensions {first} and {second}"


def permuted(dims: Sequence[int], entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.permute``."""
    order = [_dim(dim, entry) for dim in dims]
    if sorted(order) != list(range(len(entry.shape))):
        raise ValueError(f"dims {list(dims)} must name each of the {len(entry.shape)} dimensions once")
    return permute(entry, order), f" permuted to {order}"


def reshaped(shape: tuple[int, ...], entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.reshape``."""
    changed = reshape(entry, shape)
    return changed, f" reshaped to {list(changed.shape)}"


def with_cast(dtype: str, entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.cast``."""
    reason = why_no_cast(entry.dtype, dtype, requires_grad=entry.requires_grad)
    if reason:
        raise ValueError(reason)
    return replace(entry, cast=dtype), f" cast to {dtype}"


def computed(operation: Arithmetic, number: float, entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.scale`` and ``sluice.rules.add``."""
    dtypes = {part.entry.dtype for part in entry.parts} or {entry.dtype}
    if not dtypes <= _COMPUTABLE:
        how = "multiplied" if operation == "mul" else "added to"
        raise ValueError(f"{', '.join(sorted(dtypes))} cannot be {how}: only {', '.join(sorted(_COMPUTABLE))}")
    return compute(entry, operation, number), f" {'times' if operation == 'mul' else 'plus'} {number}"


def resized(size: int, dim: int, fill: float, entry: Entry) -> tuple[Entry, str]:
    """See ``sluice.rules.resize``."""
    dim = _dim(dim, entry)
    extent = f"{size} {_DIMENSIONS.get((len(entry.shape), dim), f'elements in dimension {dim}')}"
    if entry.shape[dim] >= size:
        return narrow(entry, dim, 0, size), f" cut to {extent}"
    _check_constant(fill, entry.dtype)
    return pad(entry, dim, size, fill), f" padded with {fill:g} to {extent}"


def split(
    pattern: NamePattern,
    into: tuple[str, ...],
    dim: int,
    given: tuple[int, ...] | None,
    name: str,
    matched: re.Match[str],
    entry: Entry,
) -> Iterator[tuple[str, Entry]]:
    """See ``sluice.rules.split``."""
    _check_dense(entry)
    dim = _dim(dim, entry)
    whole, count = entry.shape[dim], len(into)
    sizes = (whole // count,) * count if given is None else given
    if sum(sizes) != whole:
        expected = f"{count} equal sizes" if given is None else f"sizes {list(sizes)}"
        raise ValueError(f"{whole} elements in dimension {dim} of {list(entry.shape)} do not split into {expected}")
    start = 0
    for new, size in zip(into, sizes, strict=True):
        unit = _DIMENSIONS.get((len(entry.shape), dim), f"dimension {dim},")
        origin = f"{_origin(name, entry)}, {unit} {start}:{start + size}"
        yield expand(matched, new, pattern), replace(narrow(entry, dim, start, size), origin=origin)
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
    if not lowest <= value <= min(highest, 2**63 - 1) or int(value) != value:  # int() refuses infinity
        raise ValueError(f"{dtype} cannot hold {value}")


def _origin(name: str, entry: Entry) -> str:
    """Return the description of the changes to a tensor so far, which starts as its name."""
    return entry.origin or name
