"""The folder of the checkpoints, which are large: they go when the command ends, however it ends."""

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
    """Give a new folder and remove it afterwards, also when the process is interrupted or asked to terminate.

    Args:
        parent: Where to make it; None for the system's temporary folder.
        keep: Leave it there.
    """
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir=parent))
    # By default SIGTERM ends Python without cleaning up.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)
