"""A file that is not merged with others: its tied names, and the places of its chunks."""

from __future__ import annotations

from sluice._options import Limits
from sluice.checkpoint.names import PLACES
from sluice.checkpoint.open_file import OpenFile, open_file
from sluice.records import Index
from sluice.sources.protocol import Source

__all__ = ["one_file", "open_alone", "without_places"]


def open_alone(source: Source, limits: Limits, encoding: str) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return the index of a checkpoint of one file, and the file; closes the source if that fails.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown format.
        ReadError: It cannot be read.
    """
    file = open_file(source, limits, encoding)
    try:
        return one_file(file.index, limits), (file,)
    except BaseException:
        file.source.close()
        raise


def one_file(index: Index, limits: Limits) -> Index:
    """Return the index of a checkpoint of one file.

    Raises:
        IncompleteCheckpointError: It holds chunks from the middle of tensors.
        FormatError: It places its chunks in a malformed way.
        LimitError: It has too many names.
    """
    if PLACES in index.metadata:
        index = without_places(index, limits)
    if not index.tied:
        return index
    # Imported here: few files declare tied names.
    from sluice.checkpoint.tied_names import with_ties

    return with_ties(index, index.files[0].path, limits)


def without_places(index: Index, limits: Limits) -> Index:
    """Return the index of a file without the places of its chunks; raises as ``one_file`` does."""
    # Imported here: few checkpoints have chunks.
    from sluice.checkpoint.chunks import alone

    return alone(index, limits)
