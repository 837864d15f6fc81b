r"""Patterns of dotted names, and the new names that follow from a match. Pure; no torch.

A text is a pattern with three wildcards, and everything else in it is meant literally:

- ``*`` is one component of a name, or a part of one, which may be empty: ``h.*.bias`` matches ``h.0.bias`` and not
  ``h.0.attn.bias``, ``h.0.*bias`` matches ``h.0.bias`` too;
- ``**`` is anything, also nothing and dots: ``**bias`` matches every name that ends so;
- ``#`` is a number; only rules that join tensors take it, and it gives their order.

A compiled regular expression is used as it is. Both have to match a whole name. A new name repeats the wildcards of the
pattern, in their order, or uses ``\1`` and ``\g<name>`` for groups of a regular expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["NamePattern", "compile_pattern", "compile_template", "expand", "spell"]

#: What a rule takes for a pattern.
NamePattern = str | re.Pattern[str]

_WILDCARDS = re.compile(r"\*\*|\*|#")

_MEANINGS = {"**": "(.*)", "*": "([^.]*)", "#": "([0-9]+)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A pattern that is ready to match."""

    #: Matches whole names; each wildcard is a group.
    regex: re.Pattern[str]
    #: The wildcards in their order; None for a regular expression.
    wildcards: tuple[str, ...] | None

    @property
    def number(self) -> int | None:
        """Group of the ``#``, or None."""
        return self.wildcards.index("#") + 1 if self.wildcards and "#" in self.wildcards else None


def compile_pattern(pattern: NamePattern, *, numbered: bool = False) -> _Compiled:
    """Return a pattern that is ready to match.

    Args:
        pattern: A text with wildcards, or a regular expression.
        numbered: Whether it may hold one ``#``.

    Raises:
        TypeError: It is neither a text nor a regular expression.
        ValueError: It is empty, or it has a ``#`` too many.
    """
    if isinstance(pattern, re.Pattern):
        return _Compiled(regex=pattern, wildcards=None)
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern is a text or a compiled regular expression, not {type(pattern).__name__}")
    return _compile_text(pattern, numbered=numbered)


@lru_cache(maxsize=4096)
def _compile_text(pattern: str, *, numbered: bool) -> _Compiled:
    wildcards = tuple(_WILDCARDS.findall(pattern))
    if wildcards.count("#") > numbered:
        raise ValueError(
            f"pattern {pattern!r} has a # too many: only one tensor out of several takes one, and only one"
        )
    return _Compiled(regex=re.compile(_translate(pattern), re.DOTALL), wildcards=wildcards)


@lru_cache(maxsize=4096)
def compile_template(template: str, pattern: _Compiled) -> str:
    """Return a new name as a template for ``re.Match.expand``.

    Raises:
        TypeError: It is no text.
        ValueError: Its wildcards are not those of the pattern.
    """
    if not isinstance(template, str):
        raise TypeError(f"a new name is a text, not {type(template).__name__}")
    if pattern.wildcards is None:
        return template
    groups = [number for number, wildcard in enumerate(pattern.wildcards, 1) if wildcard != "#"]
    repeated = [pattern.wildcards[number - 1] for number in groups]
    if _WILDCARDS.findall(template) != repeated:
        wanted = " ".join(repeated) or "no wildcards"
        raise ValueError(
            f"the new name {template!r} must repeat the wildcards of the pattern in their order ({wanted}); use a "
            "regular expression for anything else"
        )
    numbers = iter(groups)
    return _WILDCARDS.sub(lambda _: rf"\g<{next(numbers)}>", template.replace("\\", r"\\"))


def expand(found: re.Match[str], new: str, pattern: NamePattern) -> str:
    """Return the new name of a name that matched.

    Raises:
        ValueError: The new name refers to groups that the regular expression does not have.
    """
    template = compile_template(new, compile_pattern(pattern, numbered=True))
    try:
        return found.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(f"the new name {new!r} does not go with {spell(pattern)}: {error}") from error


def spell(pattern: NamePattern) -> str:
    """Return a pattern as a person would write it."""
    return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)


def _translate(pattern: str) -> str:
    at, regex = 0, ""
    for found in _WILDCARDS.finditer(pattern):
        regex += re.escape(pattern[at : found.start()]) + _MEANINGS[found.group()]
        at = found.end()
    return regex + re.escape(pattern[at:])
