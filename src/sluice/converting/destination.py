"""Whether a conversion may write where it is asked to: never over what it still has to read. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from sluice._errors import SaveError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["check_destination"]


def check_destination(checkpoint: OpenCheckpoint, destination: Path, chosen: str) -> None:
    """Refuse a destination whose writing would damage the source, or change what its directory means.

    A file may replace the one file that it is made of, because it takes its name when all is read. So may a model
    directory in the Hugging Face layout replace itself: new shards have names of their own until the last moment.

    Args:
        checkpoint: What is converted.
        destination: The file or directory.
        chosen: The format that is written.

    Raises:
        SaveError: It is one of several files of the source, inside of the source's directory, or that directory in
            another format.
    """
    final = os.path.realpath(destination)
    sources = {os.path.realpath(path) for path in checkpoint.files if os.path.exists(path)}
    if chosen in {"torch", "safetensors"}:
        if len(sources) > 1 and final in sources:
            raise SaveError("this is one of the files that are converted", file=str(destination))
    elif chosen == "per-parameter" and any(_inside(path, final) for path in sources):
        problem = "files that are converted lie in this directory, where each new file would replace one at once"
        raise SaveError(problem, file=str(destination))
    if not os.path.isdir(checkpoint.path):
        return
    directory = os.path.realpath(checkpoint.path)
    same = final == directory
    if same and (chosen, checkpoint.format) == ("huggingface", "huggingface-safetensors"):
        return
    if same or _inside(final, directory):
        problem = "the destination lies in the directory that is converted, and would change what it holds"
        raise SaveError(problem, file=str(destination), found=f"source {checkpoint.path}")


def _inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip(os.sep) + os.sep)
