"""Convert a checkpoint: select its content, refuse what the format cannot hold, write the files, and report."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import why_no_cast
from sluice._errors import BudgetError, MismatchError, SaveError, UnsupportedError
from sluice._options import NO_LIMITS, MemoryLimits, PageCache
from sluice._units import format_bytes, parse_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import finished_dtype, flat_contents, whole_contents
from sluice.converting.entries import Entries
from sluice.entries.rules import Rule
from sluice.entries.tree import every_entry, walk
from sluice.matching.renaming import Rename
from sluice.reading.reader import fill_caches
from sluice.records import Entry
from sluice.reports.save import SaveReport
from sluice.writing.contents import SaveJob
from sluice.writing.formats import write_contents
from sluice.writing.save_formats import ConvertFormat
from sluice.writing.write_queue import Staging

if TYPE_CHECKING:
    from sluice.adapters.config import Adapter
    from sluice.adapters.opening import AdaptedCheckpoint

__all__ = ["check_destination", "convert_checkpoint"]


def convert_checkpoint(  # noqa: PLR0913  those of ``convert``
    checkpoint: OpenCheckpoint,
    save_format: ConvertFormat,
    job: SaveJob,
    *,
    key: str | None,
    rename: Rename | None,
    rules: Sequence[Rule],
    memory: MemoryLimits | None,
    page_cache: PageCache,
    started: float,
    adapters: Sequence[Adapter] = (),
) -> SaveReport:
    """Convert a checkpoint; ``sluice.convert`` documents errors.

    Args:
        checkpoint: The source.
        save_format: Format to write.
        job: Destination and options.
        key: Part of the checkpoint; None for the whole object, or the only state dict in it.
        rename: New names.
        rules: Rules that transform tensors, by their new names.
        memory: Limits of memory growth; None for the defaults.
        page_cache: Use of the page cache when the source is read.
        started: ``time.perf_counter()`` at the start of the call.
        adapters: Adapters to merge, by the new names.
    """
    if isinstance(job.destination, Path):
        check_destination(checkpoint, job.destination, save_format)
    if job.manifest:
        job.manifest.refuse(checkpoint.files)
    checkpoint.refuse_cast(job.dtype)
    read = whole_contents if save_format == "torch" else flat_contents
    contents = read(checkpoint, key=key, rename={} if adapters and rename is None else rename, rules=rules)
    notes = checkpoint.index.notes
    if adapters:
        merged = _merged(checkpoint, contents.tree, job.dtype, adapters)
        checkpoint = merged.checkpoint
        if job.manifest:
            sources = [each.source for each in merged.adapters]
            job.manifest.refuse(path for each in sources for path in (each, *map(str, Path(each).glob("*"))))
        notes += tuple(each.describe() for each in merged.adapters)
    if "safetensors" in checkpoint.format:
        job = replace(job, metadata={**job.metadata, **checkpoint.metadata})
    memory = memory or NO_LIMITS
    reading, writing, batch = _shares(parse_bytes(memory.staging))
    entries = Entries(
        checkpoint, contents.tree, job.dtype, batch_bytes=batch, staging_bytes=reading, page_cache=page_cache
    )
    with entries:
        _check(entries, checkpoint)
        _check_memory(entries, memory, sum(1 for _ in every_entry(contents.tree)), checkpoint.working_bytes)
        most = 2 * sum(entry.nbytes for entry in every_entry(contents.tree)) >= checkpoint.nbytes
        if most and not job.dry_run:
            fill_caches(checkpoint.sources, progress=job.progress)
        saved = write_contents(entries, save_format, replace(job, staging=Staging.make(writing)))
    return SaveReport.of(
        saved,
        started=started,
        destination=str(job.destination),
        format=save_format,
        source=checkpoint.path,
        source_format=checkpoint.format,
        key=contents.key or None,
        taken=contents.taken,
        total=contents.total,
        notes=(*notes, *contents.notes, *checkpoint.source_notes),
        dry_run=job.dry_run,
    )


def _merged(
    checkpoint: OpenCheckpoint, tree: object, dtype: str | None, adapters: Sequence[Adapter]
) -> AdaptedCheckpoint:
    """Return the checkpoint with merged adapters, and put the tensors that they change into a flat tree."""
    from sluice.adapters.opening import open_adapted  # here, not above: most conversions merge nothing
    from sluice.adapters.steps import BaseWeight

    assert isinstance(tree, dict)
    names: defaultdict[Entry, list[str]] = defaultdict(list)
    for name, entry in tree.items():
        if isinstance(entry, Entry):
            names[entry].append(name)
    weights = [
        BaseWeight(names=tuple(own), shape=entry.shape, entry=entry, dtype=finished_dtype(entry, dtype))
        for entry, own in names.items()
    ]
    merged = open_adapted(checkpoint, weights, adapters)
    for entry, own in names.items():
        tree.update(dict.fromkeys(own, merged.entries.get(own[0], entry)))
    return merged


def _check(entries: Entries, checkpoint: OpenCheckpoint) -> None:
    """Refuse data that no format holds, before anything is written."""
    names = {id(entry): name for name, entry in walk(entries.tree)}
    for entry in every_entry(entries.tree):
        name = names.get(id(entry), "_metadata")
        if entry.composite is not None:
            problem = f"a {entry.layout} tensor cannot be written"
            advice = "Leave it out with key= or rules.drop(), or load the file and save it with torch.save."
            raise UnsupportedError(problem, file=checkpoint.path, tensor=name, advice=advice)
        why = why_no_cast(entry.dtype, entries.finished(entry), requires_grad=entry.requires_grad)
        if why:
            raise MismatchError(why, file=checkpoint.path, tensor=name)


def _shares(staging_bytes: int) -> tuple[int, int, int]:
    """Divide staging between reads, writes and each of two batches of tensors, in bytes.

    Raises:
        BudgetError: It cannot be divided.
    """
    least = 2 * defaults.SMALLEST_STAGING_BYTES
    if staging_bytes < least:
        problem, advice = "staging is too small for a conversion", "Nothing was read: choose larger staging."
        expected, found = f"at least {format_bytes(least)}", format_bytes(staging_bytes)
        raise BudgetError(problem, expected=expected, found=found, advice=advice)
    reading = max(defaults.SMALLEST_STAGING_BYTES, staging_bytes // 4)
    writing = min((staging_bytes - reading) // 3, defaults.SAVE_STAGING_BYTES)
    return reading, writing, (staging_bytes - reading - writing) // 2


def _check_memory(entries: Entries, memory: MemoryLimits, tensors: int, more: int) -> None:
    """Raise ``BudgetError`` if the conversion needs more than a limit."""
    staging = parse_bytes(memory.staging)
    needed = staging + more + defaults.OVERHEAD_BYTES + defaults.OVERHEAD_PER_CONVERTED_TENSOR_BYTES * tensors
    limit, origin = entries.reader.facts.host_headroom
    if memory.host is not None:
        limit, origin = parse_bytes(memory.host), "MemoryLimits(host=...)"
    if needed > limit:
        raise BudgetError(
            f"the conversion needs {format_bytes(needed)} of host memory: {format_bytes(staging)} for staging and the "
            "rest for the index, threads and adapters",
            expected=f"at most {format_bytes(limit)} ({origin})",
            found=format_bytes(needed),
            advice="Nothing was read: choose smaller staging (MemoryLimits(staging=), --staging), or a larger limit.",
        )


def check_destination(checkpoint: OpenCheckpoint, destination: Path, chosen: str) -> None:
    """Refuse a destination that would damage the source, or change the content of its directory.

    A file may replace the only file of the source, because it is renamed after everything is read. A model directory in
    the Hugging Face layout may replace itself, because new shards have names of their own until the last step.

    Args:
        checkpoint: The source.
        destination: The file or directory.
        chosen: The format to write.

    Raises:
        SaveError: The destination is one of several files of the source, or its directory in a different format, or
            inside that directory.
    """
    final = os.path.realpath(destination)
    sources = {os.path.realpath(path) for path in checkpoint.files if os.path.exists(path)}
    if chosen in {"torch", "safetensors"} and len(sources) > 1 and final in sources:
        raise SaveError("the destination is one of the source files", file=str(destination))
    if not os.path.isdir(checkpoint.path):  # also if it is remote
        return
    directory = os.path.realpath(checkpoint.path)
    same = final == directory
    if same and (chosen, checkpoint.format) == ("huggingface", "huggingface-safetensors"):
        return
    if same or final.startswith(directory.rstrip(os.sep) + os.sep):
        problem = "the destination is inside the source directory and would change its content"
        raise SaveError(problem, file=str(destination), found=f"source {checkpoint.path}")
