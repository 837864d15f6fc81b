"""Which file objects can be read from where they stand, and the sources behind them.

A file on disk is read by its own path and descriptors, never through the object, so that readers do not share its
position. A file that has no name any more is reached through the object's descriptor, and only while that is open.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from sluice.sources.local import LocalFile
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import Source

__all__ = ["stream_source"]


def stream_source(stream: BinaryIO) -> tuple[Source, int]:
    """Return the source behind a file object, and the object's position.

    Raises:
        TypeError: It is no file on disk and no ``BytesIO``.
        CheckpointError: It is no regular file, or empty.
    """
    if isinstance(stream, io.BytesIO):
        return MemoryFile(stream), stream.tell()
    descriptor = _descriptor(stream)
    if descriptor is None:
        raise TypeError(
            f"a checkpoint cannot be read from a {type(stream).__name__}: pass a path, a file opened with "
            "open(path, 'rb'), or io.BytesIO(stream.read())"
        )
    if stream.writable():
        stream.flush()
    return LocalFile(_path(stream, descriptor)), stream.tell()


def _descriptor(stream: object) -> int | None:
    """Return the descriptor whose bytes a file object gives as they are; objects that decompress have one too."""
    stream = getattr(stream, "file", stream)  # what the module tempfile puts around a file
    raw = stream.raw if isinstance(stream, (io.BufferedReader, io.BufferedRandom)) else stream
    return raw.fileno() if isinstance(raw, io.FileIO) else None


def _path(stream: BinaryIO, descriptor: int) -> str:
    name = stream.name
    if isinstance(name, (str, bytes)):
        try:
            if os.path.samestat(os.stat(name), os.fstat(descriptor)):
                return os.fsdecode(name)
        except OSError:  # deleted or renamed since it was opened
            pass
    return f"/proc/self/fd/{descriptor}"
