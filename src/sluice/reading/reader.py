"""Everything that is read from one open checkpoint: plans run here share facts, threads and staging buffers.

Loads run one plan. Verification, comparison and conversion run many, and read the next batch while they work on one. A
failed plan ends the engine's session; the next plan begins a new one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self, TypeAlias

import torch
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._options import PageCache
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunningPlan, SessionEndedError, TargetMemory
from sluice.engine.session import Session
from sluice.engine.targets import Targets
from sluice.machine.facts import machine_facts
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import Entry, Index, LoadPlan, MachineFacts, Request, Storage, elements_of
from sluice.records.geometry import contiguous_stride
from sluice.sources.protocol import Source, is_caching

__all__ = ["CheckpointReader", "Pending", "fill_caches"]

#: Waits for tensors that are being read, and returns them.
Pending: TypeAlias = Callable[[], list[torch.Tensor]]

#: Share of the bytes of a file from which on all of it is downloaded, if it takes more than one request; less is
#: requested from the server.
_LEAST_SHARE = 0.5


class CheckpointReader:
    """Runs plans over the files of one checkpoint. A context manager: no thread outlives it."""

    def __init__(self, checkpoint: OpenCheckpoint, sources: Sequence[Source] | None = None) -> None:
        """Start nothing and ask the machine nothing yet.

        Args:
            checkpoint: What is read; it stays open while plans run.
            sources: Sources of the same bytes that are read instead of its files.
        """
        self._checkpoint = checkpoint
        self._sources = checkpoint.sources if sources is None else sources
        self._session: Session | None = None
        self._process = 0
        self._first_file = len(checkpoint.index.storages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._session is not None:
            self._session.close()

    @cached_property
    def facts(self) -> MachineFacts:
        """The machine and all files of the checkpoint, asked once for all plans."""
        return machine_facts(self._checkpoint.sources)

    def begin(self, plan: LoadPlan, targets: TargetMemory) -> RunningPlan:
        """Begin to run a plan; see ``Session.start``. After a failure or a fork this begins a new session."""
        if self._session is None or self._session.ended or self._process != os.getpid():
            self._session, self._process = Session(self._sources), os.getpid()
        return self._session.start(plan, targets)

    def window(self, file: int, first: int, end: int) -> Entry:
        """Return an entry for the bytes of a file from ``first`` to ``end``."""
        return Entry(
            elements=elements_of("uint8"),
            shape=(end - first,),
            stride=(1,),
            storage=self._first_file + file,
            storage_offset=first,
        )

    def read(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Return the tensors of entries and windows; see ``start``."""
        return self.start(entries)()

    def start(
        self,
        entries: Sequence[Entry],
        *,
        staging_bytes: int = defaults.SCAN_STAGING_BYTES,
        page_cache: PageCache = "auto",
    ) -> Pending:
        """Begin to read entries and windows, each into a row-major tensor on the host.

        Args:
            entries: The entries.
            staging_bytes: Most bytes of the staging buffers.
            page_cache: Use of the page cache.

        Returns:
            A function that waits for the tensors and returns them, in memory that lives as long as they do. It raises,
            too.

        Raises:
            FormatError: A header in front of the data is damaged.
            ReadError: The operating system failed a read.
            SourceChangedError: A file is no longer the one that was indexed.
        """
        offsets = self._checkpoint.locate(
            {number for entry in entries if entry.numel for number in entry.storages if number < self._first_file}
        )
        requests = [
            Request(name="", entry=entry, dtype=entry.dtype, device="cpu", stride=contiguous_stride(entry.shape))
            for entry in entries
        ]
        laid_out, views = single_targets(requests, self._index, offsets)
        files = self._index.files
        plan = plan_load(laid_out, files, self.facts, staging_bytes=staging_bytes, page_cache=page_cache)
        targets = Targets(plan)
        running = self.begin(plan, targets)

        def result() -> list[torch.Tensor]:
            try:
                running.wait()
            except SessionEndedError:  # another batch failed; this one was not to blame
                return self.read(entries)
            return targets.tensors(views)

        return result

    @cached_property
    def _index(self) -> Index:
        """The index with a further storage for each whole file, for windows."""
        own = self._checkpoint.index
        files = (
            Storage(file=position, offset=0, nbytes=file.identity.nbytes, key=file.path)
            for position, file in enumerate(own.files)
        )
        return replace(own, storages=(*own.storages, *files))


def fill_caches(
    sources: Sequence[Source],
    plan: LoadPlan | None = None,
    *,
    progress: Progress = False,
    look: Callable[[], None] | None = None,
) -> None:
    """Download the files that have a cache directory and are not complete in it.

    Args:
        sources: All files of a checkpoint.
        plan: What is read of them: files of which it needs little are left out. None for all files.
        progress: As in ``sluice.load_into``.
        look: Called now and then; it may raise. Given if other ranks read the rest of a file.

    Raises:
        SluiceError: A server failed.
    """
    files = {position: source for position, source in enumerate(sources) if is_caching(source)}
    if files and plan is not None:
        needed = Counter[int]()
        for read in plan.reads:
            needed[read.file] += read.nbytes
        share = 0.0 if look is not None else _LEAST_SHARE
        least = {i: max(1.0, share * (file.identity.nbytes - defaults.CACHE_PIECE_BYTES)) for i, file in files.items()}
        files = {i: file for i, file in files.items() if needed[i] >= least[i]}
    if not files:
        return
    done = 0
    with byte_progress(progress, "download", sum(file.identity.nbytes for file in files.values())) as report:

        def arrived(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if look is not None:
                look()
            if report is not None:
                report(done)

        for file in files.values():
            end = done + file.identity.nbytes
            file.fill(arrived)
            arrived(end - done)  # what another thread or process brought, or the system refused
