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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sluice._errors import FormatError, MismatchError
from sluice._matching import Outline
from sluice._mismatch import SHOWN, section
from sluice._options import Limits
from sluice._records import Entry
from sluice._renaming import Rename, rename_entries
from sluice._rules import Rule, apply_rules
from sluice._tree import flatten, likely_state_dicts, refusal, state_dict_candidates, subtree, unsupported
from sluice._units import format_bytes

__all__ = ["Selection", "only_state_dict", "select", "unwrap"]

#: Components that torch.compile, DistributedDataParallel and DataParallel put into names.
_WRAPPERS = frozenset({"module", "_orig_mod"})

#: Last component of the name under which a state dict holds what a module's ``get_extra_state`` returned.
_EXTRA_STATE = "_extra_state"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping:
    """A part of the checkpoint that could be a state dict."""

    key: str | None
    entries: Mapping[str, Entry]
    #: Version of each module's part of it, by the module's name.
    versions: Mapping[str, int]
    #: Extra state of modules, which is no part of ``entries`` even where it is a tensor.
    extra_state: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The names of one mapping of the checkpoint and those of the module, in one spelling."""

    mapping: _Mapping
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
        return self.form.mapping.key

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.outside)

    @property
    def content(self) -> object:
        """What it gives to the module: the same dict can stand at two places of a checkpoint."""
        entries = self.form.mapping.entries
        return frozenset((own, entries[original]) for original, own in self.names.items()) or self.key

    def describe(self) -> str:
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
    read = _Reader(tree, rename, tuple(rules), limits or Limits())
    candidates = state_dict_candidates(tree) if key is None else (key,)
    views = [view for mapping in read.all(candidates) for view in _views(mapping, outline)]
    if key is None and "" not in candidates and not any(view.is_whole for view in views):
        views += _nested(read, outline)
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


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes mappings of parts of a checkpoint."""

    tree: object
    rename: Rename | None
    rules: tuple[Rule, ...]
    limits: Limits

    def mapping(self, key: str) -> _Mapping:
        part = subtree(self.tree, key)
        versions = {}
        metadata = getattr(part, "_metadata", None)  # torch's own name for it
        if isinstance(metadata, dict):
            for path, values in metadata.items():
                version = values.get("version") if isinstance(values, dict) else None
                if isinstance(path, str) and type(version) is int:
                    versions[path] = version
        flat = flatten(part, self.limits)
        entries = {name: entry for name, entry in flat.items() if _EXTRA_STATE not in name.split(".")}
        return _Mapping(
            key=key or None,
            entries=apply_rules(rename_entries(entries, self.rename), self.rules),
            versions=versions,
            extra_state=rename_entries(dict(_extra_state(part)), self.rename),
        )

    def all(self, keys: Sequence[str]) -> list[_Mapping]:
        """Return the mappings that the rules apply to; raise what is wrong with the first where there is none."""
        made, errors = [], []
        for key in keys:
            try:
                made.append(self.mapping(key))
            except MismatchError as error:
                if not self.rules:
                    raise
                errors.append(error)
        if errors and not made:
            raise errors[0]
        return made


def _extra_state(part: object) -> Iterator[tuple[str, object]]:
    """Yield name and value of what modules keep besides tensors, in a flat or nested state dict."""
    waiting = [("", part)]
    while waiting:
        prefix, value = waiting.pop()
        for name, child in value.items() if isinstance(value, dict) else ():
            if isinstance(name, str):
                if name.rpartition(".")[2] == _EXTRA_STATE:
                    yield prefix + name, child
                elif isinstance(child, dict):
                    waiting.append((f"{prefix}{name}.", child))


def _nested(read: _Reader, outline: Outline) -> list[_View]:
    """Return the whole tree as a state dict where its nested dicts spell exactly the names of the module."""
    try:
        mapping = read.mapping("")
    except FormatError:  # two tensors have the same dotted name: fine in a tree, but not a state dict
        return []
    except MismatchError:
        if not read.rules:
            raise
        return []
    return [view for view in _views(mapping, outline) if view.is_whole]


def _views(mapping: _Mapping, outline: Outline) -> list[_View]:
    """Return the view that fits as a whole; without one, all: as the mapping is, and behind every prefix that helps."""
    views: list[_View] = []
    for form in _forms(mapping, outline):
        for find in (_names_as_they_are, _names_behind_prefixes):
            views += _views_of(form, find(form), outline)
            whole = [view for view in views if view.is_whole]
            if whole:
                return whole[:1]
    return views


def _forms(mapping: _Mapping, outline: Outline) -> Iterator[_Form]:
    own = {
        name: name
        for name in (*(name for slot in outline.slots for name in slot.names), *outline.extra_state, *outline.refused)
    }
    entries = mapping.entries
    yield _Form(mapping=mapping, unwrapped=False, found={name: name for name in entries}, own=own)
    found, bare = ({unwrap(name): name for name in names} for names in (entries, own))
    changed = found.keys() != entries.keys() or bare.keys() != own.keys()
    if changed and len(found) == len(entries) and len(bare) == len(own):
        yield _Form(mapping=mapping, unwrapped=True, found=found, own=bare)


def unwrap(name: str) -> str:
    """Return a name without the components that torch's wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _names_as_they_are(form: _Form) -> dict[str, dict[str, str]]:
    own = form.own
    return {"": {original: own[seen] for seen, original in form.found.items() if seen in own}}


def _names_behind_prefixes(form: _Form) -> dict[str, dict[str, str]]:
    """Return the name in the module for each name of the mapping, by the prefix that is between them."""
    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    own = form.own
    for seen, original in form.found.items():
        start = seen.find(".") + 1
        while start:
            if (rest := seen[start:]) in own:
                names[seen[:start]][original] = own[rest]
            start = seen.find(".", start) + 1
    return names


def _views_of(form: _Form, names: Mapping[str, Mapping[str, str]], outline: Outline) -> Iterator[_View]:
    slot_of = {name: i for i, slot in enumerate(outline.slots) for name in slot.names}
    required = {i for i, slot in enumerate(outline.slots) if slot.added_in is None}
    ordered = sorted(form.found) if any(names) else []
    for prefix, matching in names.items():
        covered = {slot_of.get(own) for own in matching.values()}
        behind = len(form.found)
        if prefix:  # its last character is a dot: what starts with it lies before the character after the dot
            behind = bisect_left(ordered, f"{prefix[:-1]}/") - bisect_left(ordered, prefix)
        yield _View(
            form=form,
            prefix=prefix,
            names=matching,
            missing=len(required) - len(required & covered),
            unexpected=behind - len(matching),
            outside=len(form.found) - behind,
        )


def _fitting(views: Sequence[_View], *, parts: bool) -> _View | None:
    """Return the only view that fits strictly, or None; ``views`` come plainest first."""
    candidates = [view for view in views if not (view.missing or view.unexpected)]
    fits = _distinct([view for view in candidates if view.is_whole])
    if not fits and parts:
        complete = {view.key for view in views if not (view.prefix or view.form.unwrapped or view.missing)}
        fits = _distinct([view for view in candidates if view.key not in complete])
    if len(fits) > 1:
        raise _ambiguous("more than one part of the checkpoint fits the module", fits)
    return fits[0] if fits else None


def _nearest(views: Sequence[_View]) -> _View:
    """Return the view to report against where none fits strictly."""
    best = max(views, key=lambda view: len(view.names))
    rivals = _distinct([best, *(view for view in views if _is_rival(view, best))])
    if len(rivals) > 1:
        raise _ambiguous("no part of the checkpoint fits the module exactly, and more than one comes near", rivals)
    return best


def _is_rival(view: _View, best: _View) -> bool:
    """Return whether a view is another possible meaning of the checkpoint than the one that comes nearest."""
    if view.key != best.key:
        return 2 * len(view.names) >= len(best.names)
    return bool(best.prefix) and len(view.names) == len(best.names)


def _distinct(views: Sequence[_View]) -> list[_View]:
    """Return the first view of each content."""
    if len(views) < 2:
        return list(views)
    kept: dict[object, _View] = {}
    for view in views:
        kept.setdefault(view.content, view)
    return list(kept.values())


def _ambiguous(problem: str, views: Sequence[_View]) -> MismatchError:
    lines = [view.describe() for view in views[:SHOWN]]
    return MismatchError(f"{problem}\n{section('choose one', lines, views)}\nNothing was read")


def _selection(view: _View, *, whole: bool) -> Selection:
    """Return the entries of a view; with ``whole`` also the names of its mapping that have no place in the module."""
    mapping, own = view.form.mapping, view.form.own
    entries = {name: mapping.entries[original] for original, name in view.names.items()}
    notes = []
    if view.form.unwrapped:
        notes.append("names were compared without the components 'module' and '_orig_mod'")
    if whole:
        for seen, original in view.form.found.items():
            if original not in view.names:
                bare = seen.removeprefix(view.prefix)
                entries[original if bare in entries else bare] = mapping.entries[original]
    elif view.outside:
        notes.append(f"{view.outside} tensors of the checkpoint outside {view.prefix!r} were left out")
    module_of = {_module_of(seen): _module_of(name) for seen, name in own.items()}
    versions = {}
    for path, version in mapping.versions.items():
        seen = unwrap(path) if view.form.unwrapped else path
        if f"{seen}.".startswith(view.prefix) and seen[len(view.prefix) :] in module_of:
            versions[module_of[seen[len(view.prefix) :]]] = version
    extra_state = {}
    for path, value in mapping.extra_state.items():
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
