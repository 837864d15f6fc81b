"""Parts of a checkpoint that could be a state dict: what each holds, with new names and after rules. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice._errors import MismatchError
from sluice._options import Limits
from sluice._records import Entry
from sluice._renaming import Rename, rename_entries
from sluice._rules import Rule, apply_rules
from sluice._tree import flatten, subtree

__all__ = ["Candidate", "CandidateReader"]

#: Last component of the name under which a state dict holds what a module's ``get_extra_state`` returned.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A part of a checkpoint that could be a state dict."""

    #: Where it lies in the checkpoint, as a dotted path; None is the whole.
    key: str | None
    #: Its tensors, by their new names and after rules.
    entries: Mapping[str, Entry]
    #: Version of each module's part of it, by the module's name.
    versions: Mapping[str, int]
    #: Extra state of modules, which is no part of ``entries`` even where it is a tensor.
    extra_state: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReader:
    """Makes candidates of parts of a checkpoint."""

    #: ``Index.tree``.
    tree: object
    #: New names.
    rename: Rename | None
    #: What the tensors become.
    rules: tuple[Rule, ...]
    #: Bounds for flattening the tree.
    limits: Limits

    def read(self, key: str) -> Candidate:
        """Return the part at ``key``; ``""`` is the whole.

        Raises:
            FormatError: Two tensors have the same dotted name.
            MismatchError: ``key`` does not exist, ``rename`` gives two entries the same name, or a rule does not apply.
        """
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
        return Candidate(
            key=key or None,
            entries=apply_rules(rename_entries(entries, self.rename), self.rules),
            versions=versions,
            extra_state=rename_entries(dict(_extra_state(part)), self.rename),
        )

    def read_all(self, keys: Sequence[str]) -> list[Candidate]:
        """Return the parts that the rules apply to; raise what is wrong with the first where there is none."""
        made, errors = [], []
        for key in keys:
            try:
                made.append(self.read(key))
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
