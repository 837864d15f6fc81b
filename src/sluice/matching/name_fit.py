"""How the names of a candidate stand to those of a module: as they are, unwrapped, behind a prefix. Pure; no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.matching.candidates import Candidate
from sluice.matching.match import Outline

__all__ = ["Form", "NameView", "name_views", "unwrap"]

#: Components that torch.compile, DistributedDataParallel and DataParallel put into names.
_WRAPPERS = frozenset({"module", "_orig_mod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The names of one candidate and those of the module, in one spelling."""

    #: The candidate.
    candidate: Candidate
    #: Whether the components of wrappers were taken out of both.
    unwrapped: bool
    #: Name in the candidate for each name in this spelling.
    found: Mapping[str, str]
    #: Name in the module for each name in this spelling.
    own: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameView:
    """A form behind one prefix."""

    #: The names.
    form: Form
    #: With the dot at its end; empty for the names as they are.
    prefix: str
    #: Name in the module for each name of the candidate that lies behind the prefix and has one there.
    names: Mapping[str, str]
    #: Tensors of the module that none of them fills, without those that older state dicts do not have.
    missing: int
    #: Names behind the prefix that the module does not have.
    unexpected: int
    #: Names of the candidate that do not lie behind the prefix.
    outside: int

    @property
    def key(self) -> str | None:
        """Where its candidate lies."""
        return self.form.candidate.key

    @property
    def is_whole(self) -> bool:
        """Whether both have the same names."""
        return not (self.missing or self.unexpected or self.outside)

    @property
    def content(self) -> object:
        """What it gives to the module: the same dict can stand at two places of a checkpoint."""
        entries = self.form.candidate.entries
        return frozenset((own, entries[original]) for original, own in self.names.items()) or self.key

    def describe(self) -> str:
        """Return how well it fits and the ``key=`` that takes it, for people."""
        path = ".".join(part for part in (self.key, self._prefix_in_file()) if part)
        where = f"key={path!r}" if path else "the whole checkpoint"
        unwrapped = " without wrapper names" if self.form.unwrapped else ""
        return (
            f"{where}{unwrapped}: {len(self.names)} names match, {self.missing} tensors of the module are missing, "
            f"{self.unexpected + self.outside} names are not in the module"
        )

    def _prefix_in_file(self) -> str:
        """Return the prefix as the file spells it, which is what ``key=`` takes."""
        if not (self.form.unwrapped and self.prefix):
            return self.prefix.removesuffix(".")
        parts = next(iter(self.names)).split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next(head for head in heads if f"{unwrap(head)}." == self.prefix)


def name_views(candidate: Candidate, outline: Outline) -> list[NameView]:
    """Return the view that fits as a whole; without one, all: as the names are, and behind every prefix that helps."""
    views: list[NameView] = []
    for form in _forms(candidate, outline):
        for find in (_names_as_they_are, _names_behind_prefixes):
            views += _views_of(form, find(form), outline)
            whole = [view for view in views if view.is_whole]
            if whole:
                return whole[:1]
    return views


def _forms(candidate: Candidate, outline: Outline) -> Iterator[Form]:
    own = {
        name: name
        for name in (*(name for slot in outline.slots for name in slot.names), *outline.extra_state, *outline.refused)
    }
    entries = candidate.entries
    yield Form(candidate=candidate, unwrapped=False, found={name: name for name in entries}, own=own)
    found, bare = ({unwrap(name): name for name in names} for names in (entries, own))
    changed = found.keys() != entries.keys() or bare.keys() != own.keys()
    if changed and len(found) == len(entries) and len(bare) == len(own):
        yield Form(candidate=candidate, unwrapped=True, found=found, own=bare)


def unwrap(name: str) -> str:
    """Return a name without the components that torch's wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _names_as_they_are(form: Form) -> dict[str, dict[str, str]]:
    own = form.own
    return {"": {original: own[seen] for seen, original in form.found.items() if seen in own}}


def _names_behind_prefixes(form: Form) -> dict[str, dict[str, str]]:
    """Return the name in the module for each name of the candidate, by the prefix that is between them."""
    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    own = form.own
    for seen, original in form.found.items():
        start = seen.find(".") + 1
        while start:
            if (rest := seen[start:]) in own:
                names[seen[:start]][original] = own[rest]
            start = seen.find(".", start) + 1
    return names


def _views_of(form: Form, names: Mapping[str, Mapping[str, str]], outline: Outline) -> Iterator[NameView]:
    slot_of = {name: i for i, slot in enumerate(outline.slots) for name in slot.names}
    required = {i for i, slot in enumerate(outline.slots) if slot.added_in is None}
    ordered = sorted(form.found) if any(names) else []
    for prefix, matching in names.items():
        covered = {slot_of.get(own) for own in matching.values()}
        behind = len(form.found)
        if prefix:  # its last character is a dot: what starts with it lies before the character after the dot
            behind = bisect_left(ordered, f"{prefix[:-1]}/") - bisect_left(ordered, prefix)
        yield NameView(
            form=form,
            prefix=prefix,
            names=matching,
            missing=len(required) - len(required & covered),
            unexpected=behind - len(matching),
            outside=len(form.found) - behind,
        )
