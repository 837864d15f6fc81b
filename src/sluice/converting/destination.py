"""Check that a conversion does not write over files that it still has to read. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from sluice._errors import SaveError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["check_destination"]


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
    if chosen in {"torch", "safetensors"}:
        if len(sources) > 1 and final in sources:
            raise SaveError("the destination is one of the source files", file=str(destination))
    elif chosen == "per-parameter" and any(_inside(path, final) for path in sources):
        problem = "the destination directory contains source files that are still to be read"
        raise SaveError(problem, file=str(destination))
    if not os.path.isdir(checkpoint.path):  # also if it is remote
        return
    directory = os.path.realpath(checkpoint.path)
    same = final == directory
    if same and (chosen, checkpoint.format) == ("huggingface", "huggingface-safetensors"):
        return
    if same or _inside(final, directory):
        problem = "the destination is inside the source directory and would change its content"
        raise SaveError(problem, file=str(destination), found=f"source {checkpoint.path}")


def _inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip(os.sep) + os.sep)
