r"""Patterns of dotted names, new names from a match, and devices by prefixes of names. Pure; no torch.

Text is a pattern with three wildcards; all other characters are literal:

- ``*`` matches one component of a name, or a part of one, which may be empty: ``h.*.bias`` matches ``h.0.bias`` and not
  ``h.0.attn.bias``, ``h.0.*bias`` matches ``h.0.bias`` too;
- ``**`` matches any text, including dots and nothing: ``**bias`` matches every name that ends in ``bias``;
- ``#`` matches a number; only rules that join tensors accept it, and it is their order.

A compiled regular expression is used unchanged. Both must match a whole name. A new name repeats the wildcards of the
pattern, in their order, or uses ``\1`` and ``\g<name>`` for groups of a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

__all__ = [
    "NamePattern",
    "Placement",
    "compile_pattern",
    "compile_template",
    "device_of",
    "expand",
    "is_pattern",
    "spell",
]

#: Pattern of a rule.
NamePattern = str | re.Pattern[str]

#: Device by prefix of names, as torch writes it with its index; ``""`` is for all names. The longest prefix wins.
Placement = Mapping[str, str]

_WILDCARDS = re.compile(r"\*\*|\*|#")

_MEANINGS = {"**": "(.*)", "*": "([^.]*)", "#": "([0-9]{1,18})"}


class _Compiled(Struct, frozen=True, kw_only=True):
    """A compiled pattern."""

    #: Matches whole names; each wildcard is a group.
    regex: re.Pattern[str]
    #: The wildcards in order; None for a regular expression.
    wildcards: tuple[str, ...] | None

    @property
    def number(self) -> int | None:
        """Group of the ``#``, or None."""
        return self.wildcards.index("#") + 1 if self.wildcards and "#" in self.wildcards else None


def is_pattern(name: NamePattern) -> bool:
    """Return whether a pattern is more than one name."""
    return isinstance(name, re.Pattern) or "*" in name


def compile_pattern(pattern: NamePattern, *, numbered: bool = False) -> _Compiled:
    """Return a compiled pattern.

    Args:
        pattern: Text with wildcards, or a regular expression.
        numbered: Whether it may contain one ``#``.

    Raises:
        TypeError: It is neither text nor a regular expression.
        ValueError: It has more ``#`` than allowed.
    """
    if isinstance(pattern, re.Pattern):
        return _Compiled(regex=pattern, wildcards=None)
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str or a compiled regular expression, not {type(pattern).__name__}")
    return _compile_text(pattern, numbered=numbered)


@lru_cache(maxsize=4096)
def _compile_text(pattern: str, *, numbered: bool) -> _Compiled:
    wildcards = tuple(_WILDCARDS.findall(pattern))
    if wildcards.count("#") > numbered:
        raise ValueError(f"pattern {pattern!r} has too many #: only concatenate and stack accept it, and only once")
    return _Compiled(regex=re.compile(_translate(pattern), re.DOTALL), wildcards=wildcards)


@lru_cache(maxsize=4096)
def compile_template(template: str, pattern: _Compiled) -> str:
    """Return a new name as a template for ``re.Match.expand``.

    Raises:
        TypeError: It is not a str.
        ValueError: Its wildcards are not those of the pattern.
    """
    if not isinstance(template, str):
        raise TypeError(f"a new name must be a str, not {type(template).__name__}")
    if pattern.wildcards is None:
        return template
    groups = [number for number, wildcard in enumerate(pattern.wildcards, 1) if wildcard != "#"]
    repeated = [pattern.wildcards[number - 1] for number in groups]
    if _WILDCARDS.findall(template) != repeated:
        expected = " ".join(repeated) or "no wildcards"
        raise ValueError(
            f"the new name {template!r} must repeat the wildcards of the pattern in order ({expected}); use a "
            "regular expression for anything else"
        )
    numbers = iter(groups)
    return _WILDCARDS.sub(lambda _: rf"\g<{next(numbers)}>", template.replace("\\", r"\\"))


def expand(matched: re.Match[str], new: str, pattern: NamePattern) -> str:
    """Return the new name for a match.

    Raises:
        ValueError: The new name refers to groups that the regular expression does not have.
    """
    template = compile_template(new, compile_pattern(pattern, numbered=True))
    try:
        return matched.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(f"the new name {new!r} does not fit {spell(pattern)}: {error}") from error


def spell(pattern: NamePattern) -> str:
    """Return a pattern as users write it."""
    return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)


def _translate(pattern: str) -> str:
    end, regex = 0, ""
    for wildcard in _WILDCARDS.finditer(pattern):
        regex += re.escape(pattern[end : wildcard.start()]) + _MEANINGS[wildcard.group()]
        end = wildcard.end()
    return regex + re.escape(pattern[end:])


def device_of(name: str, placement: Placement) -> str | None:
    """Return the device of a tensor; None if no prefix fits and the tensor stays on its device.

    Example:
        >>> device_of("blocks.10.weight", {"blocks.1": "cuda:1", "blocks": "cuda:0"})
        'cuda:0'
    """
    if not placement:
        return None
    prefix = name
    while prefix and prefix not in placement:
        prefix = prefix.rpartition(".")[0]
    return placement.get(prefix)
