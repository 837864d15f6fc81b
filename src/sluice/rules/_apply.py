"""What a rule of ``sluice.rules`` is, and how several are applied. Pure: no data, no torch.

A rule maps entries by name to entries by name. It looks at every name once and in order; what its pattern does not
match passes through. Rules compose: each sees what the one before it made. The kinds of rules are in ``_rule_kinds``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from sluice._errors import MismatchError
from sluice._messages import SHOWN, section
from sluice.records import Entry
from sluice.records.bulk import collector_paused
from sluice.rules._patterns import NamePattern, compile_pattern, spell

__all__ = ["EachRule", "Rule", "RuleFindings", "apply_rules"]

#: Names that are compared with a pattern that matches nothing.
_COMPARED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """One rule: which tensors it is about and what becomes of them."""

    #: Names of the tensors, as a text with wildcards or a regular expression; see ``sluice.rules``.
    pattern: NamePattern
    #: Whether it may match nothing. Otherwise that is an error, because it hides a typing error.
    optional: bool = False

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({spell(self.pattern)})"

    @abstractmethod
    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries that the rule makes of these.

        Raises:
            MismatchError: It matches nothing, gives two tensors one name, or cannot be applied to a tensor.
        """
        ...


class RuleFindings:
    """What goes wrong while one rule is applied, to be reported together."""

    def __init__(self, rule: Rule) -> None:
        #: Whether any name matched.
        self.matched = False
        self._rule = rule
        self._problems: list[tuple[str, str]] = []
        self._from: dict[str, str] = {}

    def refuse(self, name: str, reason: str) -> None:
        """Note why a tensor cannot be had."""
        self._problems.append((name, reason))

    def add(self, made: dict[str, Entry], new: str, entry: Entry, name: str) -> None:
        """Add one result, unless another one has its name."""
        if new in made:
            self.refuse(new, f"two tensors would have this name: {self._from[new]!r} and {name!r}")
            return
        made[new] = entry
        self._from[new] = name

    def raise_if_any(self, entries: Iterable[str]) -> None:
        """Raise what is wrong with the rule; ``entries`` are the names that it saw.

        Raises:
            MismatchError: It lists all tensors concerned.
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
            raise _matches_nothing(str(self._rule), self._rule.pattern, entries)


def _matches_nothing(rule: str, pattern: NamePattern, names: Iterable[str]) -> MismatchError:
    """Return the error of a pattern without a match; it shows the names that look most like it."""
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    known = list(names)
    close = get_close_matches(text, known[:_COMPARED], n=3, cutoff=0.4) or known[:3]
    return MismatchError(
        f"the rule {rule} matches no tensor: correct the pattern, or say optional=True",
        expected=f"a name that {spell(pattern)} matches",
        found=", ".join(map(repr, close)) + (", ..." if len(known) > len(close) else "") if known else "no tensors",
    )


def apply_rules(entries: Mapping[str, Entry], rules: Sequence[Rule]) -> dict[str, Entry]:
    """Return what the rules make of the entries, one rule after the other.

    Raises:
        MismatchError: A rule matches nothing, gives two tensors one name, or cannot be applied to a tensor.
        TypeError: One of ``rules`` is no rule.
    """
    made = dict(entries)
    with collector_paused():
        for number, rule in enumerate(rules):
            if not isinstance(rule, Rule):
                raise TypeError(f"rules[{number}] is no rule of sluice.rules but {type(rule).__name__}")
            made = rule.apply(made)
    return {name: replace(entry, origin="") if entry.origin == name else entry for name, entry in made.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EachRule(Rule):
    """A rule that looks at one tensor at a time."""

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entries, each matching one replaced by what the rule makes of it."""
        pattern = compile_pattern(self.pattern).regex
        findings = RuleFindings(self)
        made: dict[str, Entry] = {}
        for name, entry in entries.items():
            found = pattern.fullmatch(name)
            findings.matched |= found is not None
            try:
                results = [(name, entry)] if found is None else list(self._results(name, found, entry))
            except ValueError as error:
                findings.refuse(name, str(error))
                continue
            for new, result in results:
                findings.add(made, new, result, name)
        findings.raise_if_any(entries)
        return made

    @abstractmethod
    def _results(self, name: str, found: re.Match[str], entry: Entry) -> Iterable[tuple[str, Entry]]:
        """Return what becomes of one tensor, by name; a ``ValueError`` says why nothing can."""
        ...
