"""Apply the ``rename`` argument of a load to the names of a checkpoint. Pure; no torch.

A mapping has whole names or patterns of ``sluice.rules``, as ``--rename`` of the command line; a compiled regular
expression is a pattern, as ``--rename-regex``. The exact name decides, otherwise the first pattern that matches. Pairs
are ``re.sub`` calls, one after the other. None or an empty new name drops a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from sluice._errors import MismatchError
from sluice.entries.patterns import NamePattern, compile_pattern, compile_template, expand, is_pattern, spell
from sluice.entries.rules import nearest_to_pattern

__all__ = ["Rename", "Renaming"]

#: Names or patterns with new names, (regular expression, replacement) pairs in order, or a function.
Rename = Mapping[NamePattern, str | None] | Sequence[tuple[str | re.Pattern[str], str]] | Callable[[str], str | None]

_Value = TypeVar("_Value")


class Renaming:
    """New names, and which parts of a ``rename`` argument have matched a name.

    Args:
        rename: The argument; None keeps every name.

    Raises:
        ValueError: A new name does not repeat the wildcards of its pattern.
    """

    def __init__(self, rename: Rename | None) -> None:
        self._rename = rename
        self._unused: dict[NamePattern, None] = {}
        self._patterns: list[NamePattern] = []
        if isinstance(rename, Mapping):
            self._unused = dict.fromkeys(rename)
            self._patterns = list(filter(is_pattern, rename))
            for pattern in self._patterns:
                if new := rename[pattern]:
                    compile_template(new, compile_pattern(pattern))
        elif rename is not None and not callable(rename):
            self._unused = dict.fromkeys(pattern for pattern, _ in rename)

    def new_name(self, name: str) -> str | None:
        """Return the new name of a name, or None to drop it.

        Raises:
            TypeError: A function returns neither a name nor None.
            ValueError: A new name refers to a group that its regular expression does not have.
        """
        rename = self._rename
        if rename is None:
            return name
        if callable(rename):
            new = rename(name)
            if new is not None and not isinstance(new, str):
                raise TypeError(f"rename must return a name or None, not {type(new).__name__}")
            return new or None
        return (self._mapped(rename, name) if isinstance(rename, Mapping) else self._substituted(rename, name)) or None

    def apply(self, entries: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return values by their new names, without the dropped ones.

        Raises:
            MismatchError: Two entries get the same name.
        """
        if self._rename is None:
            return dict(entries)
        renamed: dict[str, _Value] = {}
        for name, entry in entries.items():
            new = self.new_name(name)
            if new is None:
                continue
            if new in renamed:
                problem = "rename gives two tensors of the checkpoint the same name"
                raise MismatchError(problem, tensor=new, found=repr(name))
            renamed[new] = entry
        return renamed

    def _mapped(self, rename: Mapping[NamePattern, str | None], name: str) -> str | None:
        if name in rename:
            self._unused.pop(name, None)
            return rename[name]
        for pattern in self._patterns:
            matched = compile_pattern(pattern).regex.fullmatch(name)
            if matched is not None:
                self._unused.pop(pattern, None)
                new = rename[pattern]
                return expand(matched, new, pattern) if new else None
        return name

    def _substituted(self, rename: Sequence[tuple[str | re.Pattern[str], str]], name: str) -> str:
        for pattern, replacement in rename:
            try:
                name, count = re.subn(pattern, replacement, name)
            except (re.error, IndexError) as error:
                text = f"rename=: the replacement {replacement!r} does not fit {spell(pattern)}: {error}"
                raise ValueError(text) from None
            if count:
                self._unused.pop(pattern, None)
        return name

    def check(self, names: Iterable[str]) -> None:
        """Refuse a renaming of which a part has matched nothing, also none of further ``names``.

        Raises:
            MismatchError: There is such a part.
        """
        if not self._unused:
            return
        known = list(names)
        for name in known:
            self.new_name(name)
        for pattern in self._unused:
            problem = f"rename={spell(pattern)} matches no name of the checkpoint"
            expected, found = f"a name that {spell(pattern)} matches", nearest_to_pattern(pattern, known)
            raise MismatchError(problem, expected=expected, found=found)
