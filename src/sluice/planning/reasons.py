"""Why a plan reads and casts as it does, in sentences for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._options import PageCache
from sluice._units import format_bytes
from sluice.records import REMOTE_FILESYSTEM, FileFacts, FileRecord, MachineFacts, Read, Target

__all__ = ["cast_reasons", "read_reasons"]


def read_reasons(
    reads: Sequence[Read], files: Sequence[FileRecord], facts: MachineFacts, page_cache: PageCache
) -> Iterator[str]:
    """Yield one sentence on direct and buffered reads for each reason, with the files that it applies to."""
    direct: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, int] = defaultdict(int)
    read_files: defaultdict[str, set[int]] = defaultdict(set)
    reasons = [_read_reason(file, known, page_cache) for file, known in zip(files, facts.files, strict=True)]
    for read in reads:
        if (why := reasons[read.file]) is None:
            continue
        total[why] += read.nbytes
        direct[why] += read.nbytes if read.methods[0] == "direct" else 0
        read_files[why].add(read.file)
    for why, members in read_files.items():
        where = files[min(members)].path if len(members) == 1 else f"{len(members)} files"
        yield f"{where}: {format_bytes(direct[why])} of {format_bytes(total[why])} read directly, because {why}"


def _read_reason(file: FileRecord, known: FileFacts, page_cache: PageCache) -> str | None:
    """Return the reason for the methods of the reads of a file; None if there was no choice."""
    if known.filesystem == REMOTE_FILESYSTEM:
        return None if page_cache == "auto" else f"it is not a local file: page_cache={page_cache!r} has no effect"
    if page_cache != "auto":
        return f"page_cache={page_cache!r}"
    if known.direct_io:
        if not known.cached:
            return "the page cache cannot be probed"
        return f"{sum(known.cached) / len(known.cached):.0%} of the file was cached"
    if file.identity.nbytes < defaults.DIRECT_FILE_BYTES:
        return "small files are read through the page cache"
    return f"direct reads are not used on file system {known.filesystem or 'unknown'}"


def cast_reasons(targets: Sequence[Target], reads: Iterable[Read]) -> Iterator[str]:
    """Yield one sentence on the place of casts for accelerators, if there are any."""
    casts = [
        copy
        for read in reads
        for copy in read.copies
        if targets[copy.target].device != "cpu" and copy.dtype != targets[copy.target].dtype
    ]
    host = [copy for copy in casts if copy.cast_at is not None]
    if host:
        saved = sum(copy.shape[0] * (ITEM_BYTES[copy.dtype] - ITEM_BYTES[targets[copy.target].dtype]) for copy in host)
        yield f"{len(host)} of {len(casts)} casts on the host, because that transfers {format_bytes(saved)} less"
    elif casts:
        yield "casts on the accelerator: they widen, or the host has too few cores to cast as fast as the bus transfers"
