"""Downloads of remote files into their cache directories, before data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sluice import _defaults as defaults
from sluice._progress import Progress, byte_progress
from sluice.records import LoadPlan
from sluice.sources.protocol import Source, is_caching

__all__ = ["fill_caches"]

#: Share of the bytes of a file from which on all of it is downloaded, if it takes more than one request; less is
#: requested from the server.
_LEAST_SHARE = 0.5


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
    files = [(position, source) for position, source in enumerate(sources) if is_caching(source)]
    if not files:
        return
    if plan is not None:
        needed = Counter[int]()
        for read in plan.reads:
            needed[read.file] += read.nbytes
        least = 0.0 if look is not None else _LEAST_SHARE
        files = [
            (i, file)
            for i, file in files
            if needed[i] and needed[i] >= least * max(0, file.identity.nbytes - defaults.CACHE_PIECE_BYTES)
        ]
    with byte_progress(progress, "download", sum(file.identity.nbytes for _, file in files)) as report:

        def changed() -> None:
            if look is not None:
                look()
            if report is not None:
                report(sum(file.cached_bytes for _, file in files))

        for _, file in files:
            file.fill(changed)
