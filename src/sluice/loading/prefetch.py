"""Prefetching: request all bytes of the files of a checkpoint that its cache directory does not have. No torch."""

from __future__ import annotations

import os
import time
from functools import partial

from sluice import _defaults as defaults
from sluice._errors import SaveError
from sluice._options import TEXT_ENCODING, Limits
from sluice._progress import Progress, byte_progress
from sluice._threads import Workers, spare_threads
from sluice._units import format_bytes
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint
from sluice.reports.prefetch import PrefetchedFile, PrefetchReport
from sluice.sources.protocol import Source
from sluice.sources.remote.caching import CompleteFile, filling
from sluice.sources.remote.file import RemoteFile

__all__ = ["prefetch"]


def prefetch(
    source: CheckpointSource, cache: str, *, encoding: str = TEXT_ENCODING, progress: Progress = False
) -> PrefetchReport:
    """Fill the cache of a checkpoint. What is cached already is not requested again.

    Args:
        source: Addresses with a cache directory.
        cache: That directory, for the report.
        encoding: Encoding of the text in files from Python 2.
        progress: As in ``sluice.load_into``.

    Raises:
        SaveError: The cache cannot hold it.
        SluiceError: The checkpoint cannot be opened, or a server fails.
    """
    started = time.perf_counter()
    with OpenCheckpoint.open(source, limits=Limits(), encoding=encoding) as checkpoint:
        sources = checkpoint.sources
        _check_bound(sources, cache)
        _fill(sources, progress)
        left = [_left(each) for each in sources]
    return PrefetchReport(
        source=checkpoint.path,
        cache=os.path.abspath(os.path.expanduser(cache)),
        files=tuple(_row(each, problem) for each, problem in zip(sources, left, strict=True)),
        seconds=time.perf_counter() - started,
    )


def _check_bound(sources: tuple[Source, ...], cache: str) -> None:
    """Refuse files that the cache cannot hold together, before they are requested.

    Raises:
        SaveError: They have more bytes than its bound.
    """
    bounds = [cached.entry.bound for cached in map(filling, sources) if cached is not None]
    total = sum(source.identity.nbytes for source in sources)
    if bounds and total > min(bounds):
        problem = f"the files have {format_bytes(total)}, and the bound of the cache is {format_bytes(min(bounds))}"
        raise SaveError(problem, file=cache, advice="Raise the bound (--cache-bytes).")


def _fill(sources: tuple[Source, ...], progress: Progress) -> None:
    """Request what is missing, with a few requests at once."""
    wanted = [
        (source, part)
        for source in sources
        if (cached := filling(source)) is not None and cached.entry.usable
        for part in cached.missing(source.access.request_bytes)
    ]
    total = sum(len(part) for _, part in wanted)
    with (
        byte_progress(progress, "prefetching", total) as report,
        Workers(min(spare_threads(defaults.PREFETCH_THREADS), len(wanted)), "sluice-prefetch") as workers,
    ):
        done = 0
        for task in [workers.start(partial(_fetch, source, part)) for source, part in wanted]:
            done += task.result()
            if report is not None:
                report(done)


def _fetch(source: Source, part: range) -> int:
    """Read a range, which caches it."""
    cached = filling(source)
    if cached is not None and cached.entry.usable:  # after a failure nothing more is cached
        source.read_into(part.start, memoryview(bytearray(len(part))))
    return len(part)


def _left(source: Source) -> str | None:
    """Return why a file is not cached as a whole; None if it is, or is read from a local file anyway."""
    cached = filling(source)
    if cached is None:
        return source.note if isinstance(source, RemoteFile) else None
    try:
        if cached.note is None and not cached.missing(source.access.request_bytes):
            return None
    except OSError as error:
        cached.entry.failed(error)
    return cached.note or "not completely cached"


def _row(source: Source, problem: str | None) -> PrefetchedFile:
    cached = filling(source)
    remote = isinstance(source, (RemoteFile, CompleteFile))  # otherwise in the cache of huggingface_hub
    first = min(defaults.REMOTE_FIRST_BYTES, source.identity.nbytes) if remote else 0
    requested = cached.requested if cached is not None else []
    return PrefetchedFile(
        path=source.path,
        nbytes=source.identity.nbytes,
        requested_bytes=first + sum(requested),
        requests=1 + len(requested) if remote else 0,
        problem=problem,
    )
