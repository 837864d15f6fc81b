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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sluice._errors import FormatError, MismatchError
from sluice._messages import SHOWN, section
from sluice._options import Limits
from sluice._units import format_bytes
from sluice.entries.tree import refusal, unsupported
from sluice.matching.candidates import CandidateReader, likely_state_dicts, state_dict_candidates
from sluice.matching.match import Outline
from sluice.matching.name_fit import NameView, name_views, unwrap
from sluice.matching.renaming import Rename
from sluice.records import Entry
from sluice.rules._apply import Rule

__all__ = ["Selection", "only_state_dict", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The state dict that was found for a module."""

    #: Its entries, by the names that the module uses.
    entries: Mapping[str, Entry]
    #: Where it lies in the checkpoint, as a dotted path; None is the whole.
    key: str | None
    #: Prefix that was stripped from its names, with the dot at its end; empty when none was.
    prefix: str
    #: Version of each module's part of it, by the module's name, where the file says so.
    versions: Mapping[str, int]
    #: Its extra state, by the names that the module uses: plain values and containers with ``Entry`` leaves.
    extra_state: Mapping[str, object] = field(default_factory=dict)
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()


def select(
    tree: object,
    outline: Outline,
    *,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    limits: Limits | None = None,
) -> Selection:
    """Find the state dict of a module in a checkpoint.

    Args:
        tree: ``Index.tree``.
        outline: The module.
        key: Path into the tree or dotted prefix of flat names; None searches.
        rename: Applied to the names of the state dict, relative to ``key``, before anything else.
        rules: Applied to the tensors by their new names. A part that they do not apply to is no candidate, unless it
            is the only one.
        limits: Bounds for flattening the tree.

    Raises:
        MismatchError: Nothing or more than one thing fits, ``key`` does not exist, ``rename`` gives two entries the
            same name, or the rules apply to nothing.
    """
    reader = CandidateReader(tree=tree, rename=rename, rules=tuple(rules), limits=limits or Limits())
    keys = state_dict_candidates(tree) if key is None else (key,)
    views = [view for candidate in reader.read_all(keys) for view in name_views(candidate, outline)]
    if key is None and "" not in keys and not any(view.is_whole for view in views):
        views += _nested(reader, outline)
    if not views:
        raise MismatchError("the checkpoint holds no tensors that a module could load")
    views.sort(key=lambda view: (view.form.unwrapped, len(view.prefix)))
    fitting = _fitting(views, parts=key is None)
    return _selection(fitting or _nearest(views), whole=fitting is None)


def only_state_dict(tree: object, file: str) -> str:
    """Return the key of the state dict of a checkpoint that holds one; ``""`` is the whole.

    Args:
        tree: ``Index.tree``.
        file: The checkpoint, for messages.

    Raises:
        MismatchError: There is none, or there are several; the message lists them.
        UnsupportedError: There is none, because sluice does not read the tensors that are there.
    """
    found = likely_state_dicts(tree)
    if "" in found:
        return ""
    if len(found) == 1:
        return next(iter(found))
    if not found:
        for name, leaf in unsupported(tree).items():
            raise refusal(leaf, name, file)
        raise MismatchError("the checkpoint holds no state dict of a model: no tensors by name", file=file)
    lines = [
        f"key={key!r}: {len(entries)} tensors, {format_bytes(sum(entry.nbytes for entry in entries))}"
        for key, entries in islice(found.items(), SHOWN)
    ]
    text = f"the checkpoint holds no single state dict\n{section('choose one', lines, list(found))}\nNothing was read"
    raise MismatchError(text, file=file)


def _nested(reader: CandidateReader, outline: Outline) -> list[NameView]:
    """Return the whole tree as a state dict where its nested dicts spell exactly the names of the module."""
    try:
        candidate = reader.read("")
    except FormatError:  # two tensors have the same dotted name: fine in a tree, but not a state dict
        return []
    except MismatchError:
        if not reader.rules:
            raise
        return []
    return [view for view in name_views(candidate, outline) if view.is_whole]


def _fitting(views: Sequence[NameView], *, parts: bool) -> NameView | None:
    """Return the only view that fits strictly, or None; ``views`` come plainest first."""
    strict = [view for view in views if not (view.missing or view.unexpected)]
    fits = _distinct([view for view in strict if view.is_whole])
    if not fits and parts:
        complete = {view.key for view in views if not (view.prefix or view.form.unwrapped or view.missing)}
        fits = _distinct([view for view in strict if view.key not in complete])
    if len(fits) > 1:
        raise _ambiguous("more than one part of the checkpoint fits the module", fits)
    return fits[0] if fits else None


def _nearest(views: Sequence[NameView]) -> NameView:
    """Return the view to report against where none fits strictly."""
    best = max(views, key=lambda view: len(view.names))
    rivals = _distinct([best, *(view for view in views if _is_rival(view, best))])
    if len(rivals) > 1:
        raise _ambiguous("no part of the checkpoint fits the module exactly, and more than one comes near", rivals)
    return best


def _is_rival(view: NameView, best: NameView) -> bool:
    """Return whether a view is another possible meaning of the checkpoint than the one that comes nearest."""
    if view.key != best.key:
        return 2 * len(view.names) >= len(best.names)
    return bool(best.prefix) and len(view.names) == len(best.names)


def _distinct(views: Sequence[NameView]) -> list[NameView]:
    """Return the first view of each content."""
    if len(views) < 2:
        return list(views)
    kept: dict[object, NameView] = {}
    for view in views:
        kept.setdefault(view.content, view)
    return list(kept.values())


def _ambiguous(problem: str, views: Sequence[NameView]) -> MismatchError:
    lines = [view.describe() for view in views[:SHOWN]]
    return MismatchError(f"{problem}\n{section('choose one', lines, views)}\nNothing was read")


def _selection(view: NameView, *, whole: bool) -> Selection:
    """Return the entries of a view; with ``whole`` also the names of its candidate that have no place in the module."""
    candidate, own = view.form.candidate, view.form.own
    entries = {name: candidate.entries[original] for original, name in view.names.items()}
    notes = []
    if view.form.unwrapped:
        notes.append("names were compared without the components 'module' and '_orig_mod'")
    if whole:
        for seen, original in view.form.found.items():
            if original not in view.names:
                bare = seen.removeprefix(view.prefix)
                entries[original if bare in entries else bare] = candidate.entries[original]
    elif view.outside:
        notes.append(f"{view.outside} tensors of the checkpoint outside {view.prefix!r} were left out")
    module_of = {_module_of(seen): _module_of(name) for seen, name in own.items()}
    versions = {}
    for path, version in candidate.versions.items():
        seen = unwrap(path) if view.form.unwrapped else path
        if f"{seen}.".startswith(view.prefix) and seen[len(view.prefix) :] in module_of:
            versions[module_of[seen[len(view.prefix) :]]] = version
    extra_state = {}
    for path, value in candidate.extra_state.items():
        seen = unwrap(path) if view.form.unwrapped else path
        if seen.startswith(view.prefix):
            bare = seen[len(view.prefix) :]
            extra_state[own.get(bare, bare)] = value
    return Selection(
        entries=entries,
        key=view.key,
        prefix=view.prefix,
        versions=versions,
        extra_state=extra_state,
        notes=tuple(notes),
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
