"""Find the existing name that is most similar to a missing one, in bounded time. Pure; no torch.

Comparing every missing name with every existing one takes minutes for a few thousand names. Here an index of the
existing names proposes at most ``_SHORTLIST`` of them for each missing name:

- its neighbors in the order of the first characters, and in the order of the last characters;
- those that share its rarest words and pairs of adjacent words, such as ``layers.3``.

Only these are compared with it character by character, and only the ``_COMPARED_CHARACTERS`` after what both have in
common at the start and at the end: the comparison is quadratic in their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from heapq import nlargest
from itertools import chain, islice, pairwise
from operator import itemgetter

__all__ = ["MOST_NAMES", "nearest_names"]

#: Most missing names for which a similar one is searched. Errors and tables show fewer.
MOST_NAMES = 100

#: Most existing names that are compared with one missing name.
_SHORTLIST = 8

#: Neighbors on each side that an order proposes.
_BESIDE = 1

#: A word or pair of words that more names have proposes none of them; a name gets about this many proposals.
_COMMON = 256

#: Words at the end of a name that are indexed.
_WORDS = 16

#: Characters at the start and at the end of a name that count; those between them do not.
_EDGE_CHARACTERS = 128

#: Most characters of each name that are compared after the common start and end were removed.
_COMPARED_CHARACTERS = 48

#: Least similarity of a name without a word in common. Names below it share letters by chance.
_LEAST_SIMILARITY = 0.5

#: A word ends at any of these.
_SEPARATORS = str.maketrans("_/-", "...")


def nearest_names(missing: Mapping[str, Hashable], existing: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Return the most similar existing name of the same kind for each of the first missing names that has one.

    It has at least ``_LEAST_SIMILARITY`` or a word in common with the missing name.

    Args:
        missing: The kind of each missing name, such as the shape of its tensor.
        existing: Names with their kinds.
    """
    by_kind: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in islice(missing.items(), MOST_NAMES):
        by_kind[kind].append(name)
    names: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in existing:
        if kind in by_kind:
            names[kind].append(name)
    nearest = {}
    for kind, candidates in names.items():
        index = _NameIndex(candidates, by_kind[kind]) if len(candidates) > _SHORTLIST else None
        for name in by_kind[kind]:
            shortlist = candidates if index is None else index.shortlist(name)
            similarity, other = max(((_similarity(name, each), each) for each in shortlist), key=itemgetter(0))
            if similarity >= _LEAST_SIMILARITY or _words(name) & _words(other):
                nearest[name] = other
    return nearest


class _NameIndex:
    """An index of names that proposes a few of them for a similar name.

    Args:
        names: The names; more than ``_SHORTLIST``.
        missing: The names to propose for; only their words are indexed.
    """

    def __init__(self, names: Sequence[str], missing: Iterable[str]) -> None:
        # Names that have each word or pair of words, not more than are proposed, and the number of all that have it.
        self._having: dict[Hashable, list[str]] = {part: [] for name in missing for part in _parts(name)}
        self._counts = dict.fromkeys(self._having, 0)
        for name in names:
            for part in _parts(name, self._having):
                self._counts[part] += 1
                having = self._having[part]
                if len(having) < _COMMON:
                    having.append(name)
        self._orders = [(edge, {edge(name): name for name in names}) for edge in (_start, _end)]
        self._sorted = [sorted(by_edge) for _, by_edge in self._orders]

    def shortlist(self, name: str) -> list[str]:
        """Return at most ``_SHORTLIST`` names, and at least one."""
        beside = list(self._beside(name))
        parts = sorted(filter(self._counts.__getitem__, _parts(name)), key=self._counts.__getitem__)
        pool: dict[str, None] = {}
        for part in parts:
            if self._counts[part] > _COMMON or len(pool) >= _COMMON:
                break
            pool.update(dict.fromkeys(self._having[part]))

        def shared(other: str) -> float:
            others = set(_parts(other))
            return sum(1 / self._counts[part] for part in parts if part in others)

        likely = nlargest(_SHORTLIST, pool, key=shared)
        return list(islice(dict.fromkeys(chain(beside, likely)), _SHORTLIST))

    def _beside(self, name: str) -> Iterator[str]:
        """Yield the neighbors of a name in each order."""
        for (edge, by_edge), ordered in zip(self._orders, self._sorted, strict=True):
            position = bisect_left(ordered, edge(name))
            for neighbor in ordered[max(0, position - _BESIDE) : position + _BESIDE]:
                yield by_edge[neighbor]


def _parts(name: str, known: Container[Hashable] | None = None) -> list[Hashable]:
    """Return the words of a name and the pairs of adjacent words, each once; if given, only ``known`` ones."""
    words = name[-2 * _EDGE_CHARACTERS :].translate(_SEPARATORS).lower().rsplit(".", _WORDS)[-_WORDS:]
    if known is None:
        return list(dict.fromkeys((*words, *pairwise(words))))
    return list(dict.fromkeys(part for part in (*words, *pairwise(words)) if part in known))


def _words(name: str) -> set[Hashable]:
    """Return the words of a name without numbers, which unrelated names share."""
    return {part for part in _parts(name) if isinstance(part, str) and part and not part.isdecimal()}


def _start(name: str) -> str:
    return name[:_EDGE_CHARACTERS]


def _end(name: str) -> str:
    """Return the last characters, the last first: names with the same end are neighbors."""
    return name[: -_EDGE_CHARACTERS - 1 : -1]


def _similarity(name: str, other: str) -> float:
    """Return the share of characters that two names have in common in the same order, between 0 and 1."""
    one, two = (
        each if len(each) <= 2 * _EDGE_CHARACTERS else each[:_EDGE_CHARACTERS] + each[-_EDGE_CHARACTERS:]
        for each in (name, other)
    )
    start = _common_start(one, two)
    end = _common_start(one[start:][::-1], two[start:][::-1])
    middle, other_middle = (each[start : len(each) - end][:_COMPARED_CHARACTERS] for each in (one, two))
    blocks = SequenceMatcher(a=middle, b=other_middle, autojunk=False).get_matching_blocks()
    common = start + end + sum(block.size for block in blocks)
    return 2 * common / max(1, len(one) + len(two))


def _common_start(one: str, two: str) -> int:
    """Return the number of characters that two texts have in common at the start."""
    shorter = min(len(one), len(two))
    return next((position for position in range(shorter) if one[position] != two[position]), shorter)
