"""Prefetching: download the files of a checkpoint that its cache directory does not have. No torch."""

from __future__ import annotations

import os
import time

from sluice._options import TEXT_ENCODING, Limits
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint
from sluice.reading.caches import fill_caches
from sluice.records import Traffic
from sluice.reports.prefetch import PrefetchedFile, PrefetchReport
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source, is_caching

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
        SluiceError: The checkpoint cannot be opened, or a server fails.
    """
    started = time.perf_counter()
    with OpenCheckpoint.open(source, limits=Limits(), encoding=encoding) as checkpoint:
        sources = checkpoint.sources
        fill_caches(sources, progress=progress)
        files = tuple(map(_row, sources))
    return PrefetchReport(
        source=checkpoint.path,
        cache=os.path.abspath(os.path.expanduser(cache)),
        files=files,
        seconds=time.perf_counter() - started,
    )


def _row(source: Source) -> PrefetchedFile:
    nbytes = source.identity.nbytes
    traffic: Traffic = getattr(source, "traffic", Traffic(0, 0))  # a file in the cache of huggingface_hub has none
    problem: str | None = None if isinstance(source, LocalFile) else getattr(source, "note", None)
    if is_caching(source) and source.cached_bytes < nbytes:
        problem = problem or "not completely cached"
    return PrefetchedFile(
        path=source.path,
        nbytes=nbytes,
        requested_bytes=traffic.nbytes,
        requests=traffic.requests,
        problem=problem,
    )
