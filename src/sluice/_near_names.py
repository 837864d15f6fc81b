"""Find the existing name that is most similar to a missing one, in bounded time. Pure; no torch.

Comparing every missing name with every existing one takes minutes for a few thousand names. Here only ``_SHORTLIST``
existing names are compared with each missing one: its neighbors in alphabetical order, and those that share its rarest
pairs of adjacent words, such as ``layers.3``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice, pairwise

__all__ = ["MOST_NAMES", "nearest_names"]

#: Most missing names for which a similar one is searched. Errors and tables show fewer.
MOST_NAMES = 100

#: Most existing names that are compared with one missing name.
_SHORTLIST = 8

#: A pair of words that more names have proposes none of them.
_COMMON = 256

#: Characters at the start and at the end of a name that are compared: the comparison is quadratic in their number.
_EDGE_CHARACTERS = 48

#: Least similarity. Names below it share letters by chance.
_LEAST_SIMILARITY = 0.45

#: A word ends at any of these.
_SEPARATORS = str.maketrans("_/-", "...")


def nearest_names(missing: Mapping[str, Hashable], existing: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Return the most similar existing name of the same kind for each of the first missing names that has one.

    Args:
        missing: The kind of each missing name, such as the shape of its tensor.
        existing: Names with their kinds.
    """
    # Here, not above: most loads fit.
    from difflib import get_close_matches

    wanted: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in islice(missing.items(), MOST_NAMES):
        wanted[kind].append(name)
    names: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, kind in existing:
        if kind in wanted:
            names[kind].append(name)
    nearest = {}
    for kind, candidates in names.items():
        for name, shortlist in _shortlists(wanted[kind], candidates):
            edges = {_edges(other): other for other in shortlist}
            for close in get_close_matches(_edges(name), edges, n=1, cutoff=_LEAST_SIMILARITY):
                nearest[name] = edges[close]
    return nearest


def _shortlists(missing: list[str], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each missing name with at most ``_SHORTLIST`` of the names."""
    having: dict[tuple[str, str], list[str]] = {pair: [] for name in missing for pair in _pairs(name)}
    for name in names:
        for pair in _pairs(name) & having.keys():
            having[pair].append(name)
    ordered = sorted(names)
    for name in missing:
        position = bisect_left(ordered, name)
        shared: Counter[str] = Counter(ordered[max(0, position - 1) : position + 1])
        for pair in _pairs(name):
            if len(having[pair]) <= _COMMON:
                for other in having[pair]:
                    shared[other] += 1
        yield name, [other for other, _ in shared.most_common(_SHORTLIST)]


def _pairs(name: str) -> set[tuple[str, str]]:
    """Return the pairs of adjacent words at the end of a name."""
    words = name[-4 * _EDGE_CHARACTERS :].translate(_SEPARATORS).lower().split(".")
    return set(pairwise(words))


def _edges(name: str) -> str:
    long = len(name) > 2 * _EDGE_CHARACTERS
    return name[:_EDGE_CHARACTERS] + name[-_EDGE_CHARACTERS:] if long else name
