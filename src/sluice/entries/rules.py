"""The base class of rules, and the application of a list of rules. Pure: no data, no torch.

A rule maps entries by name to entries by name. It checks every name once and in order; entries that its pattern does
not match are unchanged. Rules compose: each gets the result of the one before it. Their kinds are in ``_kinds``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from msgspec.structs import replace

from sluice._errors import MismatchError
from sluice._messages import SHOWN, section, type_of
from sluice._public import public
from sluice.entries.patterns import NamePattern, compile_pattern, spell
from sluice.records import Entry, collector_paused

__all__ = ["EachRule", "Rule", "RuleFindings", "apply_rules", "nearest_to_pattern"]

#: Maximum number of names compared with a pattern that matches nothing.
_COMPARED = 2000


@public("sluice.rules")
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """One rule: the tensors to which it applies, and its effect on them."""

    #: Pattern of their names, text with wildcards or a regular expression; see ``sluice.rules``.
    pattern: NamePattern
    #: Whether it may match nothing. By default that is an error, because it is usually a misspelled name.
    optional: bool = False

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    @abstractmethod
    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries after this rule.

        Raises:
            MismatchError: It matches nothing, gives two tensors one name, or cannot be applied to a tensor.
        """
        ...


class RuleFindings:
    """The problems of applying one rule, to be reported together."""

    def __init__(self, rule: Rule) -> None:
        #: Whether any name matched.
        self.matched = False
        self._rule = rule
        self._problems: list[tuple[str, str]] = []
        self._from: dict[str, str] = {}

    def refuse(self, name: str, reason: str) -> None:
        """Note why the rule cannot produce a tensor."""
        self._problems.append((name, reason))

    def add(self, result: dict[str, Entry], new: str, entry: Entry, name: str) -> None:
        """Add an entry to the result under its new name, unless the name is taken."""
        if new in result:
            self.refuse(new, f"two tensors would have this name: {self._from[new]!r} and {name!r}")
            return
        result[new] = entry
        self._from[new] = name

    def raise_if_any(self, entries: Iterable[str]) -> None:
        """Raise an error if there is a problem; ``entries`` are the names before the rule.

        Raises:
            MismatchError: It lists the problem of each tensor.
        """
        if len(self._problems) == 1:
            [(name, reason)] = self._problems
            raise MismatchError(f"the rule {self._rule} cannot be applied: {reason}", tensor=name)
        if self._problems:
            lines = [f"{name!r}: {reason}" for name, reason in self._problems[:SHOWN]]
            raise MismatchError(
                f"the rule {self._rule} cannot be applied\n{section('to', lines, self._problems)}\nNothing was read",
                tensor=self._problems[0][0],
            )
        if not (self.matched or self._rule.optional):
            raise MismatchError(
                f"the rule {self._rule} matches no tensor: correct the pattern, or pass optional=True",
                expected=f"a name that {spell(self._rule.pattern)} matches",
                found=nearest_to_pattern(self._rule.pattern, entries),
            )


def nearest_to_pattern(pattern: NamePattern, names: Iterable[str]) -> str:
    """Return the names that are most similar to a pattern without a match, as text for an error."""
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    known = list(names)
    close = get_close_matches(text, known[:_COMPARED], n=3, cutoff=0.4) or known[:3]
    return ", ".join(map(repr, close)) + (", ..." if len(known) > len(close) else "") if known else "no tensors"


def apply_rules(entries: Mapping[str, Entry], rules: Sequence[Rule]) -> dict[str, Entry]:
    """Return the entries after all rules, applied one after the other.

    Raises:
        MismatchError: A rule matches nothing, gives two tensors one name, or cannot be applied to a tensor.
        TypeError: One of ``rules`` is not a rule.
    """
    result = dict(entries)
    with collector_paused():
        for position, rule in enumerate(rules):
            if not isinstance(rule, Rule):
                raise TypeError(f"rules[{position}] is {type_of(rule)}, not a rule of sluice.rules")
            result = rule.apply(result)
    return {name: replace(entry, origin="") if entry.origin == name else entry for name, entry in result.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EachRule(Rule):
    """A rule that applies to one tensor at a time."""

    #: Name of the function that made it.
    kind: str
    #: Returns the names and entries that replace one entry, from ``arguments``, the name, the match of the pattern and
    #: the entry. A ``ValueError`` says why the rule cannot be applied to it.
    effect: Callable[..., Iterable[tuple[str, Entry]]]
    #: Its first arguments.
    arguments: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({spell(self.pattern)})"

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries, with each matching entry replaced by its results."""
        pattern = compile_pattern(self.pattern).regex
        findings = RuleFindings(self)
        result: dict[str, Entry] = {}
        for name, entry in entries.items():
            matched = pattern.fullmatch(name)
            findings.matched |= matched is not None
            try:
                replacements = (
                    [(name, entry)] if matched is None else list(self.effect(*self.arguments, name, matched, entry))
                )
            except ValueError as error:
                findings.refuse(name, str(error))
                continue
            for new, replacement in replacements:
                findings.add(result, new, replacement, name)
        findings.raise_if_any(entries)
        return result
