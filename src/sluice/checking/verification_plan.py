"""What a verification looks at, and in which order it is read.

A tensor whose elements do not follow each other in the files is held until it is whole and then hashed in its own
order, where it is small; otherwise it is read a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from sluice import _options as options
from sluice._errors import CheckpointError, FormatError
from sluice.checking.consumers import Content, Crc, Flow, Gathering, Taker, Turned, bytes_of, feed
from sluice.checking.non_finite import NonFiniteCounter, has_non_finite
from sluice.checking.read_order import Span, schedule
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import walk
from sluice.formats.manifest import HashAlgorithm, new_hash
from sluice.reading.scan import check_repeats, identity, row_major
from sluice.reading.sparse_indices import check_indices, pieces_of
from sluice.records import Entry, Quantized, Sparse
from sluice.reports.verify import VerifyProblem

__all__ = ["IndexCheck", "VerifyPlan"]


class IndexCheck:
    """The indices of one sparse tensor.

    Attributes:
        composite: How the tensor is made.
        flow: How the bytes come; without spans, where they are too many to be held. None where some cannot be found.
        problem: What is wrong with them.
    """

    def __init__(self, name: str, entry: Entry, composite: Sparse, file: str) -> None:
        self.composite = composite
        self.flow: Flow | None = None
        self.problem: VerifyProblem | None = None
        self._name, self._entry, self._file = name, entry, file

    def run(self, lines: Sequence[Iterable[torch.Tensor]]) -> None:
        """Check the elements of each of ``index_lines``."""
        try:
            check_indices(self._entry, lines)
        except FormatError as error:
            error.file, error.tensor = self._file, self._name
            self.problem = VerifyProblem.of(error)

    def run_held(self, indices: Sequence[torch.Tensor]) -> None:
        """Check indices that are in memory."""
        held = indices[0] if self.composite.layout == "sparse_coo" else indices
        self.run([pieces_of(one) for one in held])


class VerifyPlan:
    """What is looked at in one checkpoint; only headers of records are read to find out.

    Attributes:
        crcs: The checksums that are recorded.
        unrecorded: Names of records whose writer recorded none.
        contents: The tensors that are hashed or counted, each once.
        checks: The indices of sparse tensors.
        spans: The bytes of the files in the order in which they are read.
        problems: What headers show already.
    """

    def __init__(self, checkpoint: OpenCheckpoint, algorithm: HashAlgorithm | None, *, nan: bool) -> None:
        """Decide.

        Args:
            checkpoint: What is verified.
            algorithm: Hashes every tensor; None for no hashes.
            nan: Whether elements that are not finite are counted.

        Raises:
            FormatError: Tensors have the same name.
            LimitError: A tensor repeats its stored elements too often.
        """
        self._checkpoint = checkpoint
        self._algorithm = algorithm
        self._nan = nan
        self.problems: list[VerifyProblem] = []
        self.unrecorded: list[str] = []
        self.crcs = list(self._checksums())
        self.contents = self._wanted() if algorithm or nan else []
        self.checks = self._sparse()
        self._offsets = self._locate(self._storages())
        for check in self.checks:
            check.flow = self._held(check.composite.indices, check.run_held)
        for content in self.contents:
            if self._located(content.entry.pieces):
                self._assign(content)
        self.spans = self._order()

    def _checksums(self) -> Iterator[Crc]:
        for file, found in enumerate(self._checkpoint.checksums()):
            for one in found:
                if isinstance(one, CheckpointError):
                    self.problems.append(VerifyProblem.of(one))
                elif one.crc:
                    yield Crc(file, one)
                elif one.nbytes:
                    self.unrecorded.append(one.name)

    def _wanted(self) -> list[Content]:
        """Return each tensor once, with its names."""
        found: dict[object, Content] = {}
        for name, entry in self._checkpoint.entries.items():
            check_repeats(self._checkpoint, name, entry)
            content = found.setdefault(identity(entry), Content(entry))
            if not content.names:
                values = entry if entry.composite is None else entry.composite.values
                counted = self._nan and has_non_finite(values.dtype) and not isinstance(entry.composite, Quantized)
                content.hasher = new_hash(self._algorithm) if self._algorithm else None
                content.counter = NonFiniteCounter(values.dtype) if counted else None
            content.names.append(name)
        return [content for content in found.values() if content.hasher or content.counter]

    def _sparse(self) -> list[IndexCheck]:
        """Return each sparse tensor once; its first name is enough."""
        found: dict[int, IndexCheck] = {}
        for name, entry in walk(self._checkpoint.index.tree):
            if isinstance(entry.composite, Sparse) and id(entry) not in found:
                for indices in entry.composite.indices:
                    check_repeats(self._checkpoint, name, indices)
                found[id(entry)] = IndexCheck(name, entry, entry.composite, self._checkpoint.path)
        return list(found.values())

    def _storages(self) -> set[int]:
        pieces = [piece for content in self.contents for piece in content.entry.pieces]
        pieces += [piece for check in self.checks for piece in check.composite.indices]
        return {number for piece in pieces if piece.numel for number in piece.storages}

    def _locate(self, wanted: Iterable[int]) -> dict[int, int]:
        """Return the data offsets of storages, without those behind damaged headers."""
        storages = self._checkpoint.index.storages
        known = {number: storages[number].offset for number in wanted if storages[number].located}
        unknown = [number for number in wanted if number not in known]
        try:
            found = self._checkpoint.locate(unknown)
            return known | {number: found[number] for number in unknown}
        except CheckpointError:  # find out which
            for number in unknown:
                try:
                    known[number] = self._checkpoint.locate([number])[number]
                except CheckpointError as error:
                    self.problems.append(VerifyProblem.of(error))
            return known

    def _located(self, pieces: Iterable[Entry]) -> bool:
        return all(number in self._offsets for piece in pieces if piece.numel for number in piece.storages)

    def _span(self, piece: Entry) -> Span:
        """Return where a view of a storage lies."""
        offset, (first, end) = self._offsets[piece.storage], piece.byte_span
        return Span(self._checkpoint.index.storages[piece.storage].file, offset + first, offset + end)

    def _turn(self, piece: Entry) -> int:
        return self._checkpoint.index.storages[piece.storage].swap_bytes

    def _assign(self, content: Content) -> None:
        """Decide how the bytes of a tensor come."""
        composite = content.entry.composite
        components = content.entry.components
        if all(_in_order(one) is not None for one in components):
            counted = components if composite is None else (composite.values,)
            wanted = ((content.hasher, components), (content.counter, counted))
            content.flows = tuple(self._flow(taker, some) for taker, some in wanted if taker is not None)
            return

        def take(tensors: Sequence[torch.Tensor]) -> None:
            feed((content.taker(one), bytes_of(tensor)) for one, tensor in zip(components, tensors, strict=True))

        held = self._held(components, take) or Flow()
        content.flows, content.apart = (held,), not held.spans

    def _flow(self, taker: Taker, components: Iterable[Entry]) -> Flow:
        """Return the flow of tensors whose bytes come as they are wanted, but for the order in a number."""
        pieces = [piece for one in components for piece in _in_order(one) or () if piece.numel]
        takers = (Turned(taker, self._turn(piece)) if self._turn(piece) else taker for piece in pieces)
        return Flow(tuple(map(self._span, pieces)), tuple(takers))

    def _held(self, components: Sequence[Entry], done: Callable[[Sequence[torch.Tensor]], None]) -> Flow | None:
        """Return the flow that holds tensors until they are whole; one without spans, where they are too large.

        None where some of them are behind damaged headers.
        """
        if not self._located(piece for one in components for piece in one.pieces):
            return None
        gathering = Gathering(components, self._span, self._turn, done)
        nbytes = max(gathering.nbytes, sum(one.nbytes for one in components))
        fits = gathering.nbytes > 0 and nbytes <= options.SCAN_GATHERED_BYTES
        return Flow(gathering.spans, (gathering,) * len(gathering.spans)) if fits else Flow()

    def flows(self) -> list[Flow]:
        """Return what is served while the files are read."""
        found = [crc.flow for crc in self.crcs]
        found += [flow for content in self.contents for flow in content.flows]
        found += [check.flow for check in self.checks if check.flow is not None]
        return [flow for flow in found if flow.spans]

    def _order(self) -> tuple[Span, ...]:
        """Return the order of reading; what it cannot serve is read apart."""
        flows = self.flows()
        made = schedule(self._checkpoint.extents, [flow.spans for flow in flows])
        refused = {id(flows[number]) for number in made.refused}
        for content in self.contents:
            if any(id(flow) in refused for flow in content.flows):
                content.flows, content.apart = (Flow(),), True
        for check in self.checks:
            if id(check.flow) in refused:
                check.flow = Flow()
        return made.spans


def _in_order(component: Entry) -> list[Entry] | None:
    """Return the views of storages whose bytes, one after the other, are those of a dense tensor; None without such."""
    if not component.parts:
        return [component] if row_major(component) else None
    parts = sorted(component.parts, key=lambda part: part.start)
    rows = 0
    for part in parts:
        whole = part.entry.shape[1:] == component.shape[1:] and part.start == (rows, *(0 for _ in component.shape[1:]))
        if not (component.shape and whole and row_major(part.entry)):
            return None
        rows += part.entry.shape[0]
    return [part.entry for part in parts]
