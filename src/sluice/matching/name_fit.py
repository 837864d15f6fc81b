"""Match candidate names to module names: verbatim, unwrapped, or under a prefix. Pure; no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain

from msgspec import Struct

from sluice.matching.candidates import Candidate
from sluice.matching.match import Outline

__all__ = ["NameFit", "Spelling", "name_fits", "unwrap"]

#: Components that torch.compile, DistributedDataParallel and DataParallel put into names.
_WRAPPERS = frozenset({"module", "_orig_mod"})


class Spelling(Struct, frozen=True, kw_only=True):
    """The names of a candidate and of the module, spelled the same way."""

    #: The candidate.
    candidate: Candidate
    #: Whether the components of wrappers are removed from both.
    unwrapped: bool
    #: Name in the candidate for each of its names in this spelling.
    in_candidate: Mapping[str, str]
    #: Name in the module for each of its names in this spelling.
    in_module: Mapping[str, str]


class NameFit(Struct, frozen=True, kw_only=True):
    """How the names of a candidate under one prefix fit those of the module."""

    #: Both sets of names.
    spelling: Spelling
    #: Prefix with its dot; empty if the names are compared in full.
    prefix: str
    #: Name in the module for each name of the candidate under the prefix that has one.
    names: Mapping[str, str]
    #: Number of module tensors without a name here, except those that older state dicts do not have.
    missing: int
    #: Number of names under the prefix that the module does not have.
    unexpected: int
    #: Number of names of the candidate that are not under the prefix.
    outside: int

    @property
    def key(self) -> str | None:
        """Key of the candidate."""
        return self.spelling.candidate.key

    @property
    def is_whole(self) -> bool:
        """Whether both have the same names."""
        return not (self.missing or self.unexpected or self.outside)

    @property
    def content(self) -> object:
        """The entry of each module name, for comparison: a checkpoint can hold the same dict in two places."""
        entries = self.spelling.candidate.entries
        return frozenset((own, entries[original]) for original, own in self.names.items()) or self.key

    def describe(self) -> str:
        """Return one line for users: how well it fits, and the ``key=`` that selects it."""
        path = ".".join(part for part in (self.key, self._prefix_in_file()) if part)
        where = f"key={path!r}" if path else "the whole checkpoint"
        unwrapped = " without wrapper names" if self.spelling.unwrapped else ""
        return (
            f"{where}{unwrapped}: {len(self.names)} names match, {self.missing} tensors of the module are missing, "
            f"{self.unexpected + self.outside} names are not in the module"
        )

    def _prefix_in_file(self) -> str:
        """Return the prefix as the file spells it; ``key=`` takes this spelling."""
        if not (self.spelling.unwrapped and self.prefix):
            return self.prefix.removesuffix(".")
        parts = next(iter(self.names)).split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next(head for head in heads if f"{unwrap(head)}." == self.prefix)


def name_fits(candidate: Candidate, outline: Outline) -> list[NameFit]:
    """Return the fit of all names if there is one; otherwise the fit in full and the fit under each shared prefix."""
    fits: list[NameFit] = []
    for spelling in _spellings(candidate, outline):
        for match_names in (_full_names, _names_by_prefix):
            fits += _fits_of(spelling, match_names(spelling), outline)
            whole = [fit for fit in fits if fit.is_whole]
            if whole:
                return whole[:1]
    return fits


def _spellings(candidate: Candidate, outline: Outline) -> Iterator[Spelling]:
    names = (*(name for slot in outline.slots for name in slot.names), *outline.extra_state, *outline.refused)
    own, entries = dict(zip(names, names, strict=True)), candidate.entries
    same = dict(zip(entries, entries, strict=True))
    yield Spelling(candidate=candidate, unwrapped=False, in_candidate=same, in_module=own)
    if not any(map(_may_be_wrapped, chain(entries, own))):
        return
    bare_entries, bare_own = ({unwrap(name): name for name in names} for names in (entries, own))
    if len(bare_entries) == len(entries) and len(bare_own) == len(own):
        yield Spelling(candidate=candidate, unwrapped=True, in_candidate=bare_entries, in_module=bare_own)


def unwrap(name: str) -> str:
    """Return a name without the components that torch's wrappers put into it."""
    if not _may_be_wrapped(name):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _may_be_wrapped(name: str) -> bool:
    """Return whether the component of a wrapper can be in a name: cheap, because few names have one."""
    return "module" in name or "_orig_mod" in name


def _full_names(spelling: Spelling) -> dict[str, dict[str, str]]:
    own = spelling.in_module
    return {"": {original: own[name] for name, original in spelling.in_candidate.items() if name in own}}


def _names_by_prefix(spelling: Spelling) -> dict[str, dict[str, str]]:
    """Return the name in the module for each name of the candidate, by the prefix that separates them.

    Only ends with as many components as a name of the module are looked up: a name of a file can have thousands.
    """
    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    own = spelling.in_module
    last = {name.rpartition(".")[2] for name in own}
    longest = max(map(len, own), default=0)  # a name may consist of a million dots
    most = max((name.count(".") + 1 for name in own), default=0)
    for name, original in spelling.in_candidate.items():
        dot = name.rfind(".")
        if name[dot + 1 :] not in last:
            continue
        for _ in range(most):
            if dot < 0 or len(name) - dot - 1 > longest:
                break
            if (rest := name[dot + 1 :]) in own:
                names[name[: dot + 1]][original] = own[rest]
            dot = name.rfind(".", 0, dot)
    return names


def _fits_of(spelling: Spelling, names: Mapping[str, Mapping[str, str]], outline: Outline) -> Iterator[NameFit]:
    slot_of = {name: i for i, slot in enumerate(outline.slots) for name in slot.names}
    required = {i for i, slot in enumerate(outline.slots) if slot.added_in is None}
    total = len(spelling.in_candidate)
    ordered = sorted(spelling.in_candidate) if any(names) else []
    for prefix, matching in names.items():
        covered = {slot_of.get(own) for own in matching.values()}
        under = total
        if prefix:  # it ends in a dot: names that start with it sort before the character after the dot
            under = bisect_left(ordered, f"{prefix[:-1]}/") - bisect_left(ordered, prefix)
        yield NameFit(
            spelling=spelling,
            prefix=prefix,
            names=matching,
            missing=len(required) - len(required & covered),
            unexpected=under - len(matching),
            outside=total - under,
        )
