"""``sluice.Patched``: a checkpoint and deltas over it as one source; its changed tensors are computed when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from sluice._defaults import SCAN_STAGING_BYTES
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import listed, type_of
from sluice._options import Limits
from sluice._public import public
from sluice._units import format_bytes
from sluice.checkpoint.merging import moved
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.lookup import subtree
from sluice.entries.tree import flatten, map_leaves
from sluice.matching.selection import only_state_dict
from sluice.merging.deltas import Delta, DeltaStep, check_chain, open_delta
from sluice.merging.opening import joined
from sluice.reading.computed import WholeTensor, WholeTensors
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry
from sluice.sources.opening import find_place

if TYPE_CHECKING:
    from sluice.sources.opening import PathOrAddress

__all__ = ["Patched"]


@public()
@dataclass(frozen=True, slots=True, init=False)
class Patched:
    """A checkpoint and a chain of deltas over it, as a source: what the last step of training left.

    Deltas are directories ``weight_v000007`` as slime, miles and sglang exchange them, or files of changed elements as
    TRL writes them; ``sluice.diff(a, b, patch=...)`` makes both. Unchanged tensors are read from the base. Changed ones
    are computed whole, and handed out if they have the checksum that the delta names.

    Example:
        >>> sluice.Patched("base/", "weight_v000001/")
        Patched(base='base/', deltas=('weight_v000001/',))
    """

    #: Path or URL of the base.
    base: PathOrAddress
    #: Paths or URLs of the deltas, the oldest first.
    deltas: tuple[PathOrAddress, ...]

    def __init__(self, base: PathOrAddress | Patched, *deltas: PathOrAddress) -> None:
        """Open nothing yet; a base that has deltas itself gets more of them."""
        first, deltas = (base.base, (*base.deltas, *deltas)) if isinstance(base, Patched) else (base, deltas)
        for each in (first, *deltas):
            if find_place(each).kind not in {"local", "remote"}:
                raise TypeError(f"Patched takes paths and URLs, not {type_of(each)}")
        object.__setattr__(self, "base", first)
        object.__setattr__(self, "deltas", deltas)

    def __str__(self) -> str:
        return find_place(self.base).title

    def open_checkpoint(self, limits: Limits, encoding: str) -> OpenCheckpoint:
        """See ``OpensItself``; the headers of all files are read.

        Raises:
            FormatError: A delta is damaged.
            MismatchError: A delta is over a different base, or changes tensors that the base does not have.
            UnsupportedError: A delta is of an unknown format, encoding or checksum.
        """
        with ExitStack() as stack:
            base = stack.enter_context(OpenCheckpoint.open(self.base, limits=limits, encoding=encoding))
            deltas = []
            for each in self.deltas:
                deltas.append(open_delta(each, limits))
                if (checkpoint := deltas[-1].checkpoint) is not None:
                    stack.callback(checkpoint.close)
            check_chain(base, deltas)
            patched = _patched(base, deltas)
            stack.pop_all()
            return patched


def _patched(base: OpenCheckpoint, deltas: Sequence[Delta]) -> OpenCheckpoint:
    """Return a checkpoint of the base in which changed tensors are those of a computed file."""
    opened = [delta.checkpoint for delta in deltas if delta.checkpoint is not None]
    inputs, shifts = joined([base, *opened], "the base and its deltas")
    changing = [delta for delta in deltas if delta.checkpoint is not None]
    named = _named(base, deltas)
    steps: dict[Entry, list[DeltaStep]] = {}
    names: dict[Entry, str] = {}
    for delta, shift in zip(changing, shifts[1:], strict=True):
        for name, step in delta.steps.items():
            entry = named[name]
            if entry.composite is not None:
                raise UnsupportedError(f"a {entry.layout} tensor cannot be patched", file=delta.path, tensor=name)
            if names.setdefault(entry, name) != name:
                raise UnsupportedError(f"it is one tensor with {names[entry]!r}", file=delta.path, tensor=name)
            own = tuple(moved(each, by=shift) for each in step.inputs)
            steps.setdefault(entry, []).append(replace(step, inputs=own))
    source = _source(f"{base.path}, patched", inputs, steps, names)
    for each in opened:
        source.closing.callback(each.close)
    source.origins = inputs.index.files
    patched, entries = source.added_to(base)
    tree_of = dict(zip(steps, entries, strict=True))
    index, largest = base.index, max((entry.nbytes for entry in steps), default=0)
    version = next((each.version for each in reversed(deltas) if each.version), "")
    patched.index = replace(
        patched.index,
        format=f"patched-{index.format}",
        tree=map_leaves(index.tree, lambda entry: tree_of.get(entry, entry)),
        metadata={**({} if index.zipped else index.metadata), **({"model_version": version} if version else {})},
        notes=(*index.notes, f"{len(steps)} tensors are patched, each held whole, of {format_bytes(largest)} at most"),
    )
    return patched


def _source(
    path: str, inputs: OpenCheckpoint, steps: Mapping[Entry, Sequence[DeltaStep]], names: Mapping[Entry, str]
) -> WholeTensors:
    """Return the file of the changed tensors, each computed as a whole, as its checksum is that of the whole."""
    reader = CheckpointReader(inputs)

    def patch(entry: Entry) -> torch.Tensor:
        [whole] = reader.read([entry])
        for step in steps[entry]:
            step.apply(whole, reader.read(step.inputs), names[entry])
        return whole

    tensors = [WholeTensor(names[entry], entry.dtype, entry, partial(patch, entry)) for entry in steps]
    source = WholeTensors(path, inputs, tensors, keep=True)
    source.closing.push(reader)
    packed = max((one.nbytes for own in steps.values() for step in own for one in step.inputs), default=0)
    largest = max((entry.nbytes for entry in steps), default=0)
    source.working_bytes = largest + 2 * packed + SCAN_STAGING_BYTES if steps else 0
    return source


def _named(base: OpenCheckpoint, deltas: Sequence[Delta]) -> Mapping[str, Entry]:
    """Return the tensors of the base by the names of the deltas: those of the whole, or of its only state dict."""
    wanted = dict.fromkeys(name for delta in deltas for name in delta.steps)
    named: Mapping[str, Entry] = base.entries
    if not wanted.keys() <= named.keys():
        tree = base.index.tree
        named = flatten(subtree(tree, only_state_dict(tree, base.path)), base.limits)
    missing = [name for name in wanted if name not in named]
    if missing:
        problem = listed("the deltas change tensors that the base does not have", missing)
        advice = "Name the checkpoint that the first delta was made over."
        raise MismatchError(problem, file=base.path, advice=advice)
    return named
