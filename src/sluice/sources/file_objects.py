"""The paths of open file objects whose bytes can be read without the object.

A file on disk is read through descriptors of its own, never through the object, so that readers do not share the
position of the object. A file whose name is gone is reached through the descriptor of the object, while that is open.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO

__all__ = ["local_path"]


def local_path(stream: BinaryIO) -> str:
    """Return a path under which the file of a file object can be opened again.

    Raises:
        TypeError: The object is not a file on disk, or it decodes what it reads, as ``gzip`` and text files do.
    """
    descriptor = _descriptor(stream)
    if descriptor is None:
        raise TypeError(
            f"a checkpoint cannot be read from a {type(stream).__name__}: pass a path, a file opened with "
            "open(path, 'rb'), or io.BytesIO(stream.read())"
        )
    name = stream.name
    if isinstance(name, (str, bytes)):
        try:
            if os.path.samestat(os.stat(name), os.fstat(descriptor)):
                return os.fsdecode(name)
        except OSError:  # deleted or renamed since it was opened
            pass
    return f"/proc/self/fd/{descriptor}"


def _descriptor(stream: object) -> int | None:
    """Return the descriptor whose bytes the object returns verbatim; objects that decompress have one as well."""
    stream = getattr(stream, "file", stream)  # the module tempfile wraps its files
    raw = stream.raw if isinstance(stream, (io.BufferedReader, io.BufferedRandom)) else stream
    return raw.fileno() if isinstance(raw, io.FileIO) else None
