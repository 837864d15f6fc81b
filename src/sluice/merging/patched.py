"""``sluice.Patched``: a checkpoint and deltas over it as one source; its changed tensors are computed when read."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._defaults import SCAN_STAGING_BYTES
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import listed, type_of
from sluice._options import Limits
from sluice._public import public
from sluice._units import format_bytes
from sluice.checkpoint.merging import moved
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.checkpoint.open_file import OpenFile
from sluice.entries.lookup import subtree
from sluice.entries.tree import flatten, map_leaves
from sluice.formats.protocol import LocatedByIndex
from sluice.machine.heap import trim_heap
from sluice.matching.selection import only_state_dict
from sluice.merging.deltas import Delta, DeltaStep, check_chain, open_delta
from sluice.merging.opening import joined
from sluice.merging.source import ALIGNMENT
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry, FileRecord, Storage, elements_of
from sluice.records.geometry import contiguous_stride, round_up
from sluice.sources.opening import find_place
from sluice.sources.ranges import ComputedSource

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


class _Changed(Struct, frozen=True, kw_only=True, eq=False):
    """A tensor that deltas change, and its place in the source."""

    name: str
    #: In the base, which is the first of the joined checkpoints.
    entry: Entry
    steps: tuple[DeltaStep, ...]
    first_byte: int


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
    changed, at = [], 0
    for entry, own_steps in steps.items():
        changed.append(_Changed(name=names[entry], entry=entry, steps=tuple(own_steps), first_byte=at))
        at = round_up(at + entry.nbytes, ALIGNMENT)
    source = _PatchSource(f"{base.path}, patched", inputs, changed, opened)
    return _with(base, changed, source, next((each.version for each in reversed(deltas) if each.version), ""))


def _named(base: OpenCheckpoint, deltas: Sequence[Delta]) -> Mapping[str, Entry]:
    """Return the tensors of the base by the names of the deltas: those of the whole, or of its only state dict."""
    wanted = dict.fromkeys(name for delta in deltas for name in delta.steps)
    named: Mapping[str, Entry] = base.entries
    if not wanted.keys() <= named.keys():
        tree = base.index.tree
        named = flatten(subtree(tree, only_state_dict(tree, base.path)), base.limits)
    missing = [name for name in wanted if name not in named]
    if missing:
        error = MismatchError(listed("the deltas change tensors that the base does not have", missing), file=base.path)
        error.advice = "Name the checkpoint that the first delta was made over."
        raise error
    return named


def _with(base: OpenCheckpoint, changed: Sequence[_Changed], source: _PatchSource, version: str) -> OpenCheckpoint:
    index = base.index
    metadata = {} if index.zipped else dict(index.metadata)
    made = {
        each.entry: replace(
            each.entry,
            elements=elements_of(each.entry.dtype),
            stride=contiguous_stride(each.entry.shape),
            storage=len(index.storages) + number,
            storage_offset=0,
            parts=(),
        )
        for number, each in enumerate(changed)
    }
    storages = tuple(
        Storage(file=len(index.files), offset=each.first_byte, nbytes=each.entry.nbytes, key=each.name)
        for each in changed
    )
    largest = max((each.entry.nbytes for each in changed), default=0)
    note = f"{len(changed)} tensors are patched, each held whole, of {format_bytes(largest)} at most"
    whole = replace(
        index,
        format=f"patched-{index.format}",
        files=(*index.files, FileRecord(path=source.path, identity=source.identity)),
        storages=(*index.storages, *storages),
        tree=map_leaves(index.tree, lambda entry: made.get(entry, entry)),
        crcs=[*index.crcs, *(0 for _ in changed)] if index.crcs else (),
        metadata={**metadata, "model_version": version} if version else metadata,
        notes=(*index.notes, note),
        end=None,
    )
    own = replace(whole, storages=tuple(replace(each, file=0) for each in storages), tree=None, crcs=())
    file = OpenFile(source=source, locator=LocatedByIndex(), index=own, first_storage=len(index.storages))
    return OpenCheckpoint(base.path, whole, (*base.open_files, file), base.limits)


class _PatchSource(ComputedSource):
    """Computes patched tensors, each as a whole, as its checksum is that of the whole. Closing it closes the deltas."""

    def __init__(
        self, path: str, inputs: OpenCheckpoint, tensors: Sequence[_Changed], deltas: Sequence[OpenCheckpoint]
    ) -> None:
        super().__init__(path, inputs, tensors[-1].first_byte + tensors[-1].entry.nbytes if tensors else 0)
        self._tensors, self._deltas = tensors, deltas
        packed = max((one.nbytes for tensor in tensors for step in tensor.steps for one in step.inputs), default=0)
        largest = max((tensor.entry.nbytes for tensor in tensors), default=0)
        self.working_bytes = largest + 2 * packed + SCAN_STAGING_BYTES if tensors else 0
        self._starts = [tensor.first_byte for tensor in tensors]
        self._lock = threading.Lock()
        self._reader = CheckpointReader(inputs)
        #: Position and bytes of the tensor that was read last.
        self._held: tuple[int, memoryview] | None = None

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        """See ``RangedSource``."""
        end = offset + len(buffer)
        with self._lock:
            for position in range(max(0, bisect_right(self._starts, offset) - 1), bisect_left(self._starts, end)):
                start = self._starts[position]
                piece = self._whole(position)[max(0, offset - start) : end - start]
                at = max(0, start - offset)
                buffer[at : at + len(piece)] = piece

    def _whole(self, position: int) -> memoryview:
        if self._held is None or self._held[0] != position:
            self._held = None
            tensor = self._tensors[position]
            [whole] = self._reader.read([tensor.entry])
            for step in tensor.steps:
                step.apply(whole, self._reader.read(step.inputs), tensor.name)
            self._held = position, whole.reshape(-1).view(torch.uint8).numpy().data
            trim_heap()  # of what was unpacked
        return self._held[1]

    def close(self) -> None:
        """Close the deltas, and free the tensor that was read last."""
        self._held = None
        self._reader.__exit__(None, None, None)
        for delta in self._deltas:
            delta.close()
