"""Write the finished copy, or only its header."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice._defaults import SMALLEST_STAGING_BYTES
from sluice._options import MemoryLimits
from sluice._progress import Progress
from sluice._units import parse_bytes
from sluice.converting.convert import convert_checkpoint
from sluice.converting.entries import Entries
from sluice.formats.safetensors.header import declare_ties
from sluice.reports.save import SaveReport
from sluice.writing.contents import SaveJob
from sluice.writing.safetensors import lay_out_safetensors

if TYPE_CHECKING:
    from sluice.sharing.copies import CopyRequest

__all__ = ["convert", "outline"]


def outline(request: CopyRequest, path: Path) -> int:
    """Write a file with the header of the copy and a hole for its data, for a plan; return its size."""
    with Entries(
        request.checkpoint, request.contents()[0], request.dtype, batch_bytes=1, staging_bytes=1, page_cache="auto"
    ) as entries:
        tensors, ties = entries.distinct()
        layout = lay_out_safetensors(entries.outlines(tensors), declare_ties(ties, {"format": "pt"}))
    with path.open("xb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
    return layout.nbytes


def convert(
    request: CopyRequest,
    path: Path,
    *,
    memory: MemoryLimits | None = None,
    progress: Progress = False,
    dry_run: bool = False,
) -> SaveReport:
    """Write the copy to a path, or only lay it out."""
    if memory is not None and (staging := parse_bytes(memory.staging)) >= SMALLEST_STAGING_BYTES:  # enough for a load
        memory = replace(memory, staging=max(staging, 2 * SMALLEST_STAGING_BYTES))
    job = SaveJob(
        destination=path,
        dtype=request.dtype,
        limit_bytes=None,
        metadata={"format": "pt"},
        overwrite=True,  # published by one rename
        progress=progress,
        manifest=None,
        dry_run=dry_run,
    )
    return convert_checkpoint(
        request.checkpoint,
        "safetensors",
        job,
        key=request.key,
        rename=request.rename,
        rules=request.rules,
        memory=memory,
        page_cache="auto",
        adapters=request.adapters,
        started=time.perf_counter(),
    )
