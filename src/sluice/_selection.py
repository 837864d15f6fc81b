"""Which part of a checkpoint is the state dict of a module, by their names. Pure; no torch.

Every mapping of the checkpoint that could be a state dict is looked at behind every prefix of its names, once as the
names are and once without the components ``module`` and ``_orig_mod``, which torch's wrappers put anywhere in a name
(on either side: the module may be wrapped as well). A *strict* fit has a name for every tensor of the module and no
other name.

1. Mappings that fit strictly as a whole. One wins; several are an error, unless they hold the same entries.
2. Without one: parts of mappings, behind one prefix, that fit strictly. As before. A mapping that has every name of
   the module as it is does not count in parts.
3. Without one: the mapping that comes nearest, so that what is missing and unexpected is reported against it. There
   must be no second one with half as many matching names, or the error lists them.

With ``key`` there is one mapping, the one that it names, and it fits as a whole or is the nearest one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice._errors import MismatchError
from sluice._matching import Outline
from sluice._mismatch import SHOWN, section
from sluice._options import Limits
from sluice._records import Entry
from sluice._tree import flatten, state_dict_candidates, subtree

__all__ = ["Rename", "Selection", "rename_entries", "select"]

#: Exact names, regular expressions with replacements applied one after the other, or a function; None drops a name.
Rename = Mapping[str, str | None] | Sequence[tuple[str | re.Pattern[str], str]] | Callable[[str], str | None]

#: Components that torch.compile, DistributedDataParallel and DataParallel put into names.
_WRAPPERS = frozenset({"module", "_orig_mod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The state dict that was found for a module."""

    #: Its entries, by the names that the module uses.
    entries: Mapping[str, Entry]
    #: Where it lies in the checkpoint, as a dotted path; None is the whole.
    key: str | None
    #: Prefix that was stripped from its names, with the dot at its end; empty when none was.
    prefix: str
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The names of one mapping of the checkpoint and those of the module, in one spelling."""

    #: Where the mapping lies in the checkpoint.
    key: str | None
    #: Whether the components of wrappers were taken out of both.
    unwrapped: bool
    #: Name in the mapping for each name in this spelling.
    found: Mapping[str, str]
    #: Name in the module for each name in this spelling.
    own: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A form behind one prefix."""

    form: _Form
    prefix: str
    #: Name in the module for each name of the mapping that lies behind the prefix and has one there.
    names: Mapping[str, str]
    #: Tensors of the module that none of them fills, without those that older state dicts do not have.
    missing: int
    #: Names behind the prefix that the module does not have.
    unexpected: int
    #: Names of the mapping that do not lie behind the prefix.
    outside: int

    @property
    def key(self) -> str | None:
        return self.form.key

    def describe(self) -> str:
        path = ".".join(part for part in (self.key, self.prefix.removesuffix(".")) if part)
        where = f"key={path!r}" if path else "the whole checkpoint"
        unwrapped = " without wrapper names" if self.form.unwrapped else ""
        return (
            f"{where}{unwrapped}: {len(self.names)} names match, {self.missing} tensors of the module are missing, "
            f"{self.unexpected + self.outside} names are not in the module"
        )


def select(
    tree: object,
    outline: Outline,
    *,
    key: str | None = None,
    rename: Rename | None = None,
    limits: Limits | None = None,
) -> Selection:
    """Find the state dict of a module in a checkpoint.

    Args:
        tree: ``Index.tree``.
        outline: The module.
        key: Path into the tree or dotted prefix of flat names; None searches.
        rename: Applied to the names of the state dict, relative to ``key``, before anything else.
        limits: Bounds for flattening the tree.

    Raises:
        MismatchError: Nothing or more than one thing fits, ``key`` does not exist, or ``rename`` gives two entries the
            same name.
    """
    bounds = limits or Limits()
    keys = [key] if key is not None else [found or None for found in state_dict_candidates(tree)]
    mappings = {
        found: rename_entries(flatten(tree if found is None else subtree(tree, found), bounds), rename)
        for found in dict.fromkeys(keys)
    }
    forms = [form for found, entries in mappings.items() for form in _forms(found, entries, outline)]
    views = sorted(
        (view for form in forms for view in _views(form, outline)),
        key=lambda view: (view.form.unwrapped, len(view.prefix)),
    )
    chosen = _choose(views, mappings, parts=key is None)
    return _selection(chosen, mappings[chosen.key])


def rename_entries(entries: Mapping[str, Entry], rename: Rename | None) -> dict[str, Entry]:
    """Return the entries by their new names, without those that are dropped.

    Raises:
        MismatchError: Two entries get the same name.
        TypeError: A function returns neither a name nor None.
    """
    if rename is None:
        return dict(entries)
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        new = _rename(name, rename)
        if new is None:
            continue
        if new in renamed:
            raise MismatchError(
                "rename gives two tensors of the checkpoint the same name", tensor=new, found=repr(name)
            )
        renamed[new] = entry
    return renamed


def _rename(name: str, rename: Rename) -> str | None:
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    if callable(rename):
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise TypeError(f"rename must return a name or None, not {type(new).__name__}")
        return new
    for pattern, replacement in rename:
        name = re.sub(pattern, replacement, name)
    return name


def _forms(key: str | None, entries: Mapping[str, Entry], outline: Outline) -> Iterator[_Form]:
    own = [name for slot in outline.slots for name in slot.names] + list(outline.extra_state)
    plain = _Form(key=key, unwrapped=False, found={name: name for name in entries}, own={name: name for name in own})
    yield plain
    found, bare = ({_unwrap(name): name for name in names} for names in (entries, own))
    changed = found.keys() != plain.found.keys() or bare.keys() != plain.own.keys()
    if changed and len(found) == len(entries) and len(bare) == len(plain.own):
        yield _Form(key=key, unwrapped=True, found=found, own=bare)


def _unwrap(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _views(form: _Form, outline: Outline) -> Iterator[_View]:
    """Yield the form behind every prefix that leads to names of the module, and as it is."""
    slot_of = {name: i for i, slot in enumerate(outline.slots) for name in slot.names}
    required = {i for i, slot in enumerate(outline.slots) if slot.added_in is None}
    behind: Counter[str] = Counter({"": 0})
    names: defaultdict[str, dict[str, str]] = defaultdict(dict, {"": {}})
    for seen, original in form.found.items():
        for prefix in _prefixes(seen):
            behind[prefix] += 1
            own = form.own.get(seen[len(prefix) :])
            if own is not None:
                names[prefix][original] = own
    for prefix, matching in names.items():
        yield _View(
            form=form,
            prefix=prefix,
            names=matching,
            missing=len(required.difference(slot_of.get(own, -1) for own in matching.values())),
            unexpected=behind[prefix] - len(matching),
            outside=len(form.found) - behind[prefix],
        )


def _prefixes(name: str) -> Iterator[str]:
    end = 0
    while True:
        yield name[:end]
        end = name.find(".", end) + 1
        if not end:
            return


def _choose(views: Sequence[_View], mappings: Mapping[str | None, Mapping[str, Entry]], *, parts: bool) -> _View:
    """Return the view that wins by the rules of the module docstring; ``views`` come plainest first."""
    if not views:
        raise MismatchError("the checkpoint holds no tensors that a module could load")

    def content(view: _View) -> object:
        entries = mappings[view.key]
        return frozenset((own, entries[original]) for original, own in view.names.items()) or view.key

    fitting = [view for view in views if not (view.missing or view.unexpected)]
    whole = _distinct([view for view in fitting if not view.outside], content)
    if not whole and parts:
        complete = {view.key for view in views if not (view.prefix or view.form.unwrapped or view.missing)}
        whole = _distinct([view for view in fitting if view.key not in complete], content)
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise _ambiguous("more than one part of the checkpoint fits the module", whole)
    best = max(views, key=lambda view: len(view.names))
    rivals = [view for view in views if 2 * len(view.names) >= len(best.names) and _rivals(best, view)]
    rivals = _distinct([best, *rivals], content)
    if len(rivals) > 1:
        raise _ambiguous("no part of the checkpoint fits the module exactly, and more than one comes near", rivals)
    return best


def _rivals(best: _View, view: _View) -> bool:
    """Return whether a view that does not fit is another possible meaning of the checkpoint than the best one."""
    if view.key != best.key:
        return True
    return bool(best.prefix) and len(view.names) == len(best.names)


def _distinct(views: Sequence[_View], content: Callable[[_View], object]) -> list[_View]:
    """Return the first view of each content: the same dict can stand at two places of a checkpoint."""
    kept: dict[object, _View] = {}
    for view in views:
        kept.setdefault(content(view), view)
    return list(kept.values())


def _ambiguous(problem: str, views: Sequence[_View]) -> MismatchError:
    lines = [view.describe() for view in views[:SHOWN]]
    return MismatchError(f"{problem}\n{section('choose one', lines, views)}\nNothing was read")


def _selection(view: _View, entries: Mapping[str, Entry]) -> Selection:
    """Return the entries of a view; what does not fit the module keeps its name, to be reported."""
    fits = not (view.missing or view.unexpected)
    chosen = {
        view.names.get(original) or seen.removeprefix(view.prefix): entries[original]
        for seen, original in view.form.found.items()
        if original in view.names or not fits
    }
    notes = []
    if view.form.unwrapped:
        notes.append("names were compared without the components 'module' and '_orig_mod'")
    if fits and view.outside:
        notes.append(f"{view.outside} tensors of the checkpoint outside {view.prefix!r} were left out")
    return Selection(entries=chosen, key=view.key, prefix=view.prefix, notes=tuple(notes))
