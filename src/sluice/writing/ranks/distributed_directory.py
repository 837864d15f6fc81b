"""Directories of torch.distributed.checkpoint: a data file of each writing rank, and ``.metadata``, which commits them.

A crash at any moment leaves the old checkpoint or the new one: new data files get names that no file has, the rename of
``.metadata`` is the step that makes them the checkpoint, and data files that only the old one needs are removed last.
The next save with ``overwrite=True`` removes data files of a save that was killed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from sluice._errors import SaveError
from sluice.checkpoint.layout import METADATA_FILE
from sluice.writing.durable.directories import locked_directory, publish_set
from sluice.writing.durable.partial_files import hidden_stem, saving
from sluice.writing.durable.replacement import Replacement
from sluice.writing.shards import remove_files

__all__ = ["write_distributed_directory"]

#: Names of data files: those of torch, and those with a token, used if the usual ones exist.
_DATA = re.compile(r"__\d+_(\d+|[0-9a-f]{8})\.distcp")


def write_distributed_directory(
    directory: Path,
    sizes: Mapping[int, int],
    *,
    overwrite: bool,
    write: Callable[[Mapping[int, str], Mapping[int, str]], bytes],
) -> list[Path]:
    """Write a checkpoint and return its files, ``.metadata`` last.

    Args:
        directory: The destination; created if it does not exist.
        sizes: Size of the data file of each writing rank, in bytes.
        overwrite: Whether an existing checkpoint may be replaced.
        write: Has the ranks write their files and make them durable, and returns the content of ``.metadata``. Called
            with the final name and the hidden path of the file of each rank.

    Raises:
        SaveError: The checkpoint was not written; an existing one is intact.
    """
    with locked_directory(str(directory)):
        with saving(str(directory)):
            existing = os.listdir(directory)
        if METADATA_FILE in existing and not overwrite:
            problem = "the directory already contains a checkpoint; pass overwrite=True to replace it"
            raise SaveError(problem, file=str(directory), found=METADATA_FILE)
        remove_files(directory, [name for name in existing if hidden_stem(name, in_set=True) is not None])
        names = _names(sizes, existing)
        with ExitStack() as stack:
            files = {}
            for rank, name in names.items():
                files[rank] = stack.enter_context(Replacement(directory / name, overwrite=True, in_set=True))
                files[rank].reserve(sizes[rank])
                files[rank].hand_over()
            content = write(names, {rank: file.hidden for rank, file in files.items()})
            metadata = stack.enter_context(Replacement(directory / METADATA_FILE, overwrite=True, in_set=True))
            metadata.write_at(0, content)
            metadata.seal(nbytes=len(content))
            publish_set(str(directory), list(files.values()), metadata.publish, lambda: metadata.is_published)
        if overwrite:
            remove_files(directory, [name for name in existing if _DATA.fullmatch(name)])
    return [directory / name for name in (*names.values(), METADATA_FILE)]


def _names(ranks: Mapping[int, int], existing: list[str]) -> dict[int, str]:
    usual = {rank: f"__{rank}_0.distcp" for rank in ranks}
    if not set(usual.values()) & set(existing):
        return usual
    token = secrets.token_hex(4)
    return {rank: f"__{rank}_{token}.distcp" for rank in ranks}
