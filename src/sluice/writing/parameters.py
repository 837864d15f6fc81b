"""Writes a directory with one ``torch.save`` file for each tensor.

No single file makes such a directory the model. So all of it is written into a hidden directory beside the old one, and
the two change places in one step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice._errors import SaveError, SluiceError
from sluice._options import Limits
from sluice.checkpoint.opening import open_path
from sluice.checkpoint.survey import PARAMETER_SUFFIX, survey
from sluice.records import Entry
from sluice.sources.directory import LocalDirectory
from sluice.writing.durable.directories import replaced_directory
from sluice.writing.durable.partial_files import saving

__all__ = ["check_file_names", "parameter_directory", "parameter_file"]


@contextmanager
def parameter_directory(directory: Path, names: Iterable[str], *, overwrite: bool) -> Iterator[Path]:
    """Lend a hidden directory for the files of all tensors; it takes its place when the block ends well.

    Args:
        directory: Made when it does not exist; what else it holds stays.
        names: Of all tensors, as ``check_file_names`` accepts them.
        overwrite: Whether parameters that are there may be replaced. All of them are.

    Raises:
        SaveError: Nothing was changed.
    """
    files = {parameter_file(name) for name in names}
    _check_old(directory, files, overwrite=overwrite)
    check = _check_new if files else _no_check
    with replaced_directory(str(directory), belongs=_is_parameter, check=check) as hidden:
        yield Path(hidden)


def parameter_file(name: str) -> str:
    """Return the name of the file of a tensor."""
    return f"{name}{PARAMETER_SUFFIX}"


def check_file_names(names: Iterable[str]) -> None:
    """Raise ``SaveError`` where a tensor's name cannot be that of a file."""
    unusable = next((name for name in names if not _is_usable(name)), None)
    if unusable is not None:
        raise SaveError("no file can have this name", tensor=unusable)


def _is_usable(name: str) -> bool:
    try:
        return os.path.basename(name) == name and name not in {"", ".", ".."} and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _is_parameter(name: str) -> bool:
    return name.endswith(PARAMETER_SUFFIX)


def _check_old(directory: Path, files: set[str], *, overwrite: bool) -> None:
    """Check that what will be gone may go: parameters that are there, and nothing else that has such a name."""
    with saving(str(directory)):
        old = sorted(filter(_is_parameter, os.listdir(directory))) if directory.is_dir() else []
    if old and not overwrite:
        problem = "the directory holds parameters already; say overwrite=True to replace them"
        raise SaveError(problem, file=str(directory), found=old[0])
    for file in sorted(set(old) - files):
        if not _is_one_tensor(str(directory / file)):
            problem = "the directory holds a file that is no parameter and would be gone; move it first"
            raise SaveError(problem, file=str(directory), found=file)


def _is_one_tensor(path: str) -> bool:
    try:
        index, files = open_path(path, Limits())
    except SluiceError:
        return False
    for file in files:
        file.source.close()
    return isinstance(index.tree, Entry)


def _no_check(directory: str) -> None:
    """Accept a directory without a parameter, which nobody reads."""


def _check_new(directory: str) -> None:
    """Check that readers will take the directory for what it is, whatever else was in the old one."""
    try:
        found = survey(LocalDirectory(directory), Limits())
    except SluiceError as error:
        raise SaveError(
            f"nobody could read the directory: {error.problem}", file=directory, found=error.found
        ) from error
    if found.kind != "parameters":
        problem = "the directory holds a checkpoint of another kind, which readers prefer"
        raise SaveError(problem, file=directory, found=found.files[0])
