"""A file that several processes write at once: one has created it, under a hidden name, and puts it in place.

The others open it by that name. Each process writes bytes of its own and makes them durable; no byte is written twice.
A process that finds that the save has failed removes the hidden name: the creator cannot put the file in place then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Self

from sluice import _defaults as defaults
from sluice._errors import SaveError
from sluice.engine.staging import StagingPool
from sluice.writing.durable.direct import write_all
from sluice.writing.durable.replacement import NewFile, saving

__all__ = ["SharedFile"]


class SharedFile(NewFile):
    """An existing file: opened when its ``with`` block begins, closed after it."""

    def __enter__(self) -> Self:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with saving(self.path):
            try:
                self._descriptor = os.open(self.path, flags)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ESTALE}:
                    raise
                raise SaveError(
                    "this rank does not see the file that the first rank has created",
                    file=self.path,
                    advice="Existing files are intact. Save to a file system that all ranks share.",
                ) from error
        self._made = self.path
        return self

    def reserve(self, nbytes: int, staging: StagingPool | None = None) -> None:
        """Prepare to write a large file around the page cache; its creator has reserved the space."""
        self._bypass_cache(nbytes, staging)

    def write_runs(self, offsets: Sequence[int], sizes: Sequence[int], data: memoryview) -> None:
        """Write consecutive pieces of ``data`` to different places. Thread-safe.

        Args:
            offsets: First byte in the file of each piece.
            sizes: Size of each piece, in bytes.
            data: All pieces.
        """
        at = 0
        with saving(self.path):
            for offset, nbytes in zip(offsets, sizes, strict=True):
                piece = data[at : at + nbytes]
                at += nbytes
                # Shorter pieces would fill the list of short writes, which is made for the edges of long ones.
                if self._direct is not None and nbytes >= defaults.DIRECT_WRITE_BYTES:
                    self._direct.write(offset, piece)
                else:
                    write_all(self._descriptor, offset, piece)
