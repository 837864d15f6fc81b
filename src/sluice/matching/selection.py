"""Find the part of a checkpoint that is the state dict of a module, by names. Pure; no torch.

Every mapping of the checkpoint that could be a state dict is compared with the module, in full and under every prefix
of its names, and both verbatim and unwrapped: without the components ``module`` and ``_orig_mod``, which torch's
wrappers put anywhere in a name, on either side. A *strict* fit has a name for every tensor of the module and no other
name.

1. Mappings that fit strictly as a whole. If there is one, it is the result; several are an error, unless they hold the
   same entries.
2. If there is none: parts of mappings, under one prefix, that fit strictly; again exactly one. Parts of a mapping that
   has every name of the module verbatim do not count.
3. If there is none: the nearest mapping, against which missing and unexpected names are reported. If a second one has
   at least half as many matching names, the error lists both. If none has a matching name, it is the largest mapping.

``key`` selects one mapping, which fits as a whole or is the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import asdict

from sluice._errors import FormatError, MismatchError
from sluice._messages import SHOWN, section, type_of
from sluice._options import DEFAULT_LIMITS, Limits
from sluice._units import counted, format_bytes
from sluice.entries.lookup import subtree
from sluice.entries.rules import Rule
from sluice.entries.tree import refusal, unsupported
from sluice.matching.candidates import (
    Candidate,
    CandidateReader,
    holds_tensors,
    likely_state_dicts,
    state_dict_candidates,
)
from sluice.matching.match import Outline
from sluice.matching.name_fit import NameFit, name_fits, unwrap
from sluice.matching.renaming import Rename
from sluice.records import Entry

__all__ = ["Selection", "only_state_dict", "select", "state_dict_at"]


class Selection(Candidate, frozen=True, kw_only=True):
    """The state dict of a module in a checkpoint: a candidate whose names are those of the module."""

    #: Prefix stripped from its names, with the dot; empty if none was.
    prefix: str
    #: Notes for the report, one sentence each.
    notes: tuple[str, ...] = ()
    #: The parts of the checkpoint that were compared, one line each, if there are several and no name matches.
    candidates: tuple[str, ...] = ()


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
        rules: Applied to the tensors by their new names. A part to which they do not apply is not a candidate, unless
            it is the only part.
        limits: Bounds for flattening the tree.

    Raises:
        MismatchError: No part or more than one part fits, ``key`` does not exist, or ``rename`` or a rule matches no
            name.
    """
    reader = CandidateReader(tree=tree, rename=rename, rules=tuple(rules), limits=limits or DEFAULT_LIMITS)
    keys = list(state_dict_candidates(tree)) if key is None else [key]
    read = reader.read_all(keys)
    own = {name for slot in outline.slots for name in slot.names}.union(outline.refused)
    if len(read) == 1 and read[0].entries.keys() == own:  # nothing to search, as in most loads
        return Selection(**asdict(read[0]), prefix="")
    fits = [fit for candidate in read for fit in name_fits(candidate, outline)]
    if key is None and "" not in keys and not any(fit.is_whole for fit in fits):
        fits += _nested(reader, outline)
    if not fits:
        raise MismatchError("the checkpoint holds no named tensors to load into a module")
    fits.sort(key=lambda fit: (fit.spelling.unwrapped, len(fit.prefix)))
    strict = _strict_fit(fits, parts=key is None)
    chosen = strict or _nearest(fits)
    rivals = _distinct(fits) if not chosen.names else []
    return _selection(
        chosen,
        keep_unexpected=strict is None,
        candidates=tuple(fit.describe() for fit in rivals[:SHOWN]) if len(rivals) > 1 else (),
    )


def state_dict_at(tree: object, key: str | None, file: str) -> tuple[Mapping[str, Any], str]:
    """Return the state dict at a key of a checkpoint, and the key; the only one if it is None.

    Raises:
        MismatchError: There is none, or there is something else; see ``only_state_dict``.
    """
    key = only_state_dict(tree, file) if key is None else key
    part = subtree(tree, key)
    if not isinstance(part, Mapping):
        found = "a tensor" if isinstance(part, Entry) else type_of(part)
        raise MismatchError("this part of the checkpoint is not a state dict", file=file, tensor=key, found=found)
    return part, key


def only_state_dict(tree: object, file: str, *, argument: str = "key", option: str = "--key") -> str:
    """Return the key of the only state dict in a checkpoint; ``""`` is the whole checkpoint.

    Args:
        tree: ``Index.tree``.
        file: The checkpoint, for messages.
        argument: Name of the caller's argument that chooses one, for messages.
        option: Option of the command that chooses one, for messages.

    Raises:
        MismatchError: There is none, or there are several; the message lists them.
        UnsupportedError: There is none, and the checkpoint holds tensors of a kind that sluice does not read.
    """
    candidates = likely_state_dicts(tree)
    if "" in candidates or holds_tensors(tree) or tree == {}:
        return ""
    if len(candidates) == 1:
        return next(iter(candidates))
    if not candidates:
        for name, leaf in unsupported(tree).items():
            raise refusal(leaf, name, file)
        raise MismatchError("the checkpoint holds no state dict: none of its dicts maps names to tensors", file=file)
    from shlex import quote  # here, not above: only this error needs it

    lines = [
        f"{argument}={key!r} ({option} {quote(key)}): {counted(len(entries), 'tensor')}, "
        f"{format_bytes(sum(entry.nbytes for entry in entries))}"
        for key, entries in islice(candidates.items(), SHOWN)
    ]
    choices = section("choose one", lines, list(candidates))
    raise MismatchError(f"the checkpoint holds more than one state dict\n{choices}\nNothing was read", file=file)


def _nested(reader: CandidateReader, outline: Outline) -> list[NameFit]:
    """Return the fit of the whole tree if its nested dicts spell exactly the names of the module."""
    try:
        candidate = reader.read("")
    except FormatError:  # two tensors with the same dotted name are valid in a tree, but not in a state dict
        return []
    except MismatchError:
        if not reader.changes:
            raise
        return []
    return [fit for fit in name_fits(candidate, outline) if fit.is_whole]


def _strict_fit(fits: Sequence[NameFit], *, parts: bool) -> NameFit | None:
    """Return the only strict fit, or None; ``fits`` are sorted from the plainest on."""
    strict = [fit for fit in fits if not (fit.missing or fit.unexpected)]
    distinct = _distinct([fit for fit in strict if fit.is_whole])
    if not distinct and parts:
        complete = {fit.key for fit in fits if not (fit.prefix or fit.spelling.unwrapped or fit.missing)}
        distinct = _distinct([fit for fit in strict if fit.key not in complete])
    if len(distinct) > 1:
        raise _ambiguous("more than one part of the checkpoint fits the module", distinct)
    return distinct[0] if distinct else None


def _nearest(fits: Sequence[NameFit]) -> NameFit:
    """Return the fit to report against if there is no strict fit."""
    best = max(fits, key=lambda fit: len(fit.names))
    if not best.names:
        return best
    rivals = _distinct([best, *(fit for fit in fits if _is_rival(fit, best))])
    if len(rivals) > 1:
        raise _ambiguous("no part of the checkpoint fits the module exactly, and more than one is close", rivals)
    return best


def _is_rival(fit: NameFit, best: NameFit) -> bool:
    """Return whether a fit is a plausible alternative to the nearest one."""
    if fit.key != best.key:
        return 2 * len(fit.names) >= len(best.names)
    return bool(best.prefix) and len(fit.names) == len(best.names)


def _distinct(fits: Sequence[NameFit]) -> list[NameFit]:
    """Return the first fit of each distinct content."""
    if len(fits) < 2:
        return list(fits)
    kept: dict[object, NameFit] = {}
    for fit in fits:
        kept.setdefault(fit.content, fit)
    return list(kept.values())


def _ambiguous(problem: str, fits: Sequence[NameFit]) -> MismatchError:
    lines = [fit.describe() for fit in fits[:SHOWN]]
    return MismatchError(f"{problem}\n{section('choose one with key= (--key)', lines, fits)}\nNothing was read")


def _selection(fit: NameFit, *, keep_unexpected: bool, candidates: tuple[str, ...]) -> Selection:
    """Return the entries of a fit, with ``keep_unexpected`` also those whose names the module does not have."""
    candidate, own = fit.spelling.candidate, fit.spelling.in_module
    entries = {name: candidate.entries[original] for original, name in fit.names.items()}
    notes = []
    if fit.spelling.unwrapped:
        notes.append("names were compared without the components 'module' and '_orig_mod'")
    if keep_unexpected:
        for name, original in fit.spelling.in_candidate.items():
            if original not in fit.names:
                bare = name.removeprefix(fit.prefix)
                entries[original if bare in entries else bare] = candidate.entries[original]
    elif fit.outside:
        notes.append(f"{fit.outside} tensors of the checkpoint outside {fit.prefix!r} were left out")
    module_of: dict[str, str] = {}
    paths = (path for name in own.values() for path in _modules_around(name)) if candidate.versions else ()
    for path in dict.fromkeys(paths):
        module_of.setdefault(unwrap(path) if fit.spelling.unwrapped else path, path)
    versions = {}
    for path, version in candidate.versions.items():
        spelled = unwrap(path) if fit.spelling.unwrapped else path
        if f"{spelled}.".startswith(fit.prefix):
            bare = spelled[len(fit.prefix) :]
            versions[module_of.get(bare, bare)] = version  # also of modules without tensors
    extra_state = {}
    for path, value in candidate.extra_state.items():
        spelled = unwrap(path) if fit.spelling.unwrapped else path
        if spelled.startswith(fit.prefix):
            bare = spelled[len(fit.prefix) :]
            extra_state[own.get(bare, bare)] = value
    return Selection(
        entries=entries,
        key=fit.key,
        prefix=fit.prefix,
        versions=versions,
        extra_state=extra_state,
        notes=tuple(notes),
        candidates=candidates,
    )


def _modules_around(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a tensor, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name
