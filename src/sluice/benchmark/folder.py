"""Temporary directory for large checkpoints, removed when the command ends, also on SIGTERM."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["temporary_folder"]


@contextmanager
def temporary_folder(parent: Path | None = None, *, keep: bool = False) -> Iterator[Path]:
    """Lend a new directory and remove it afterwards, also if the process is interrupted or terminated.

    Args:
        parent: Parent directory, which is created; None for the system's temporary directory.
        keep: Whether to keep it.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir=parent))
    # By default SIGTERM ends Python without cleanup.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)
