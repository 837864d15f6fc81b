"""Stream targets of a checkpoint to files under construction, through a fixed amount of staging memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._errors import BudgetError
from sluice._options import MemoryLimits, PageCache
from sluice._units import format_bytes, parse_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.file_targets import FileTargets
from sluice.engine.host_memory import HostMemory
from sluice.engine.staging import StagingPool
from sluice.engine.targets import Targets
from sluice.planning.conversion import TargetGroup, group_targets, in_long_runs, plan_group, plan_stream
from sluice.planning.threads import staging_buffer_bytes
from sluice.reading.reader import CheckpointReader
from sluice.records import Target
from sluice.writing.chunks import Staging

__all__ = ["TargetStream"]

#: Writes a piece of a target: ``(position of the target, first byte of the piece in it, bytes)``.
Write = Callable[[int, int, memoryview], None]


class TargetStream:
    """Moves targets of one checkpoint to files."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        *,
        tensors: int,
        memory: MemoryLimits | None = None,
        page_cache: PageCache = "auto",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Collect machine facts and check the memory limits.

        Args:
            checkpoint: The source.
            tensors: Number of tensors to move.
            memory: Limits of memory growth; None for the defaults.
            page_cache: Use of the page cache.
            progress: Called with the number of bytes written so far.

        Raises:
            BudgetError: The limits cannot be kept.
        """
        memory = memory or MemoryLimits()
        self._checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self._facts = self._reader.facts
        self._page_cache: PageCache = page_cache
        self._staging_bytes = parse_bytes(memory.staging)
        self._progress = progress
        self._done = 0
        #: Size of the memory in which targets with short pieces are assembled, in bytes.
        self.window_bytes = self._staging_bytes // 2
        if self.window_bytes < defaults.SMALLEST_STAGING_BYTES:
            raise BudgetError(
                "staging is too small for a conversion",
                expected=f"at least {format_bytes(2 * defaults.SMALLEST_STAGING_BYTES)}",
                found=format_bytes(self._staging_bytes),
            )
        #: Buffers for direct writes, a part of staging; None if staging is too small to be divided.
        self.writing: StagingPool | None = None
        needed = self._staging_bytes + defaults.OVERHEAD_BYTES + defaults.OVERHEAD_PER_CONVERTED_TENSOR_BYTES * tensors
        limit, origin = self._facts.host_headroom
        if memory.host is not None:
            limit, origin = parse_bytes(memory.host), "MemoryLimits(host=...)"
        if needed > limit:
            raise BudgetError(
                f"the conversion needs {format_bytes(needed)} of host memory: {format_bytes(self._staging_bytes)} for "
                "staging and the rest for the index and threads",
                expected=f"at most {format_bytes(limit)} ({origin})",
                found=format_bytes(needed),
            )
        self._reading_bytes = self._staging_bytes
        if self._staging_bytes >= defaults.SHARED_STAGING_BYTES:
            writing_bytes = min(self._staging_bytes // 4, defaults.SAVE_STAGING_BYTES)
            self.writing = Staging.make(writing_bytes).pool
            self._reading_bytes -= writing_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def is_scattered(self, target: Target) -> bool:
        """Return whether a target is written in short pieces in any order, because it does not fit the window."""
        return not in_long_runs(target) and target.nbytes > self.window_bytes

    def move(self, targets: Sequence[Target], write: Write) -> None:
        """Write every byte of ``targets`` once.

        Args:
            targets: The targets; their fills name the source.
            write: Called from any thread.

        Raises:
            ReadError: A read failed.
            SourceChangedError: A file of the checkpoint changed.
            SaveError: A write failed.
        """
        short = [i for i, target in enumerate(targets) if target.nbytes and not in_long_runs(target)]
        gathered = [i for i in short if targets[i].nbytes <= self.window_bytes]
        apart = set(gathered)
        for batch in _batches(targets, [i for i, one in enumerate(targets) if one.nbytes and i not in apart]):
            self._stream(targets, batch, write)
        if gathered:
            self._reader.release_staging()  # the window takes the place of half of it
            window = HostMemory(self.window_bytes, huge_pages=self._facts.huge_pages)
            for batch in _batches(targets, gathered):
                for group in group_targets(targets, batch, self.window_bytes):
                    self._gather(targets, group, window, write)
            self._reader.release_staging()

    def _stream(self, targets: Sequence[Target], batch: Sequence[int], write: Write) -> None:
        plan = plan_stream(
            [targets[i] for i in batch],
            self._checkpoint.index.files,
            self._facts,
            staging_bytes=self._reading_bytes,
            buffer_bytes=staging_buffer_bytes(self._staging_bytes, self._facts.access),
            page_cache=self._page_cache,
        )
        parts = FileTargets(plan, lambda position, at, piece: write(batch[position], at, piece))
        self._reader.run(plan, parts, progress=lambda _: self._report(parts.written))
        self._report(parts.written)
        self._done += parts.written

    def _gather(self, targets: Sequence[Target], group: TargetGroup, window: HostMemory, write: Write) -> None:
        chosen = [targets[i] for i in group.targets]
        plan = plan_group(
            chosen,
            self._checkpoint.index.files,
            self._facts,
            staging_bytes=self._reading_bytes - self.window_bytes,
            page_cache=self._page_cache,
        )
        with torch.inference_mode(mode=False):
            existing = {
                position: torch.frombuffer(
                    window.mapping,
                    dtype=torch_dtype(target.dtype),
                    count=target.nbytes // ITEM_BYTES[target.dtype],
                    offset=window.start + offset,
                )
                for position, (target, offset) in enumerate(zip(chosen, group.offsets, strict=True))
            }
        held = window.view()

        def completed(position: int) -> None:
            first, nbytes = group.offsets[position], chosen[position].nbytes
            write(group.targets[position], 0, held[first : first + nbytes])
            self._done += nbytes
            self._report(0)

        self._reader.run(plan, Targets(plan, existing), completed=completed)
        for position, target in enumerate(chosen):
            if not target.fills:  # nothing was read for it
                completed(position)

    def _report(self, more: int) -> None:
        if self._progress:
            self._progress(self._done + more)


def _batches(targets: Sequence[Target], positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of positions whose plans take little memory."""
    batch: list[int] = []
    fills = 0
    for position in positions:
        more = len(targets[position].fills) + 1
        if batch and fills + more > defaults.STREAM_FILLS:
            yield batch
            batch, fills = [], 0
        batch.append(position)
        fills += more
    if batch:
        yield batch
