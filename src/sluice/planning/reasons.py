"""Why a plan reads as it does, in sentences for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sluice import _defaults as defaults
from sluice._options import PageCache
from sluice._units import format_bytes
from sluice.records import REMOTE_FILESYSTEM, FileFacts, FileRecord, MachineFacts, Read

__all__ = ["read_reasons"]


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
