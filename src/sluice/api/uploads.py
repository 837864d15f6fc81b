"""Saves and conversions to object stores: the verb writes to the local path that the upload lends."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from sluice.reports.save import SaveReport
from sluice.writing.uploads import Upload

__all__ = ["uploaded"]


def uploaded(
    upload: Upload, write: Callable[[str], SaveReport], *, overwrite: bool, manifest: str | os.PathLike[str] | None
) -> SaveReport:
    """Write locally, upload, and return the report with addresses instead of local paths.

    Args:
        upload: The destination.
        write: Called with the local path.
        overwrite: Whether existing objects may be replaced.
        manifest: The argument of the verb.

    Raises:
        SaveError: The local files could not be written, or the store failed or refused.
        ValueError: A manifest was requested.
    """
    if manifest is not None:
        raise ValueError("manifest= needs a local destination; sluice.verify checks the uploaded files")
    with upload:
        report = write(str(upload.path))
        if not report.dry_run:
            upload.commit(report.files, overwrite=overwrite)
        return replace(
            report,
            destination=upload.url,
            files=tuple(map(upload.url_of, report.files)),
            replaced=tuple(map(upload.url_of, report.replaced)),
        )
