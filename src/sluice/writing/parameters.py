"""Directories with one ``torch.save`` file per tensor, replaced as a whole.

No single file commits such a directory. The files are therefore written to a hidden directory next to the old one, and
the two are exchanged in one step.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sluice._errors import SaveError, SluiceError
from sluice._options import Limits
from sluice.checkpoint.layout import PARAMETER_SUFFIX
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.checkpoint.survey import survey
from sluice.checkpoint.tied_names import TIES_FILE
from sluice.records import Entry
from sluice.sources.directory import LocalDirectory
from sluice.writing.durable.directories import replaced_directory
from sluice.writing.durable.partial_files import saving
from sluice.writing.durable.replacement import NewFile
from sluice.writing.uploads import Upload

__all__ = ["check_file_names", "link_ties", "old_parameters", "parameter_directory", "parameter_file", "ties_file"]

#: Error numbers of a system that cannot make a hard link.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

#: Bytes of a file that are copied at once.
_COPIED_AT_ONCE = 1 << 20


@contextmanager
def parameter_directory(directory: Path | Upload, names: Iterable[str], *, overwrite: bool) -> Iterator[Path | Upload]:
    """Lend a hidden directory for the files of all tensors, which replaces the destination if the block succeeds.

    A store has no hidden directories: the prefix itself is lent, and its objects are replaced one by one.

    Args:
        directory: The destination; created if it does not exist. Other files in it are kept.
        names: Names of all tensors, checked by ``check_file_names``.
        overwrite: Whether existing parameters may be replaced; all of them are.

    Raises:
        SaveError: The directory was not written; an existing one is intact.
    """
    files = {parameter_file(name) for name in names}
    _check_old(directory, files, overwrite=overwrite)
    if isinstance(directory, Upload):
        yield directory
        return
    check = _check_new if files else _no_check
    with replaced_directory(str(directory), belongs=_is_written, check=check) as hidden:
        yield Path(hidden)


def parameter_file(name: str) -> str:
    """Return the name of the file of a tensor."""
    return f"{name}{PARAMETER_SUFFIX}"


def link_ties(directory: Path | Upload, ties: Mapping[str, str]) -> None:
    """Give the file of a tensor its further names, and declare them: readers tie only names that are declared.

    Names are hard links. A file system that has none gets copies, which readers do not tie.

    Args:
        directory: The hidden directory, with the files of the stored names.
        ties: Further names: ``{name: stored name}``.

    Raises:
        SaveError: The operating system failed.
    """
    if not ties:
        return
    for name, stored in ties.items():
        if isinstance(directory, Upload):
            directory.copy(parameter_file(stored), parameter_file(name))
        else:
            _link(directory / parameter_file(stored), directory / parameter_file(name))
    content = ties_file(ties)
    with directory.file(TIES_FILE) if isinstance(directory, Upload) else NewFile(directory / TIES_FILE) as out:
        out.write_at(0, content)
        out.seal(nbytes=len(content))


def ties_file(ties: Mapping[str, str]) -> bytes:
    """Return the content of the file that declares tied names; ``ties`` is as for ``link_ties``."""
    return json.dumps(dict(ties), ensure_ascii=False, separators=(",", ":")).encode()


def _link(old: Path, new: Path) -> None:
    """Make a hard link, or a copy if the file system has no hard links or no further one for this file."""
    with saving(str(new)):
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return
        with open(old, "rb") as source, NewFile(new) as out:
            written = 0
            while piece := source.read(_COPIED_AT_ONCE):
                out.write_at(written, piece)
                written += len(piece)
            out.seal(nbytes=written)


def check_file_names(names: Iterable[str]) -> None:
    """Raise ``SaveError`` if the name of a tensor cannot be a file name."""
    unusable = next((name for name in names if not _is_usable(name)), None)
    if unusable is not None:
        raise SaveError("the tensor name cannot be used as a file name", tensor=unusable)


def _is_usable(name: str) -> bool:
    try:
        return os.path.basename(name) == name and name not in {"", ".", ".."} and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _is_parameter(name: str) -> bool:
    return name.endswith(PARAMETER_SUFFIX)


def _is_written(name: str) -> bool:
    return _is_parameter(name) or name == TIES_FILE


def old_parameters(directory: Path | Upload) -> list[str]:
    """Return the names of the existing files of parameters, sorted."""
    if isinstance(directory, Upload):
        names = directory.names()
    else:
        with saving(str(directory)):
            names = os.listdir(directory) if directory.is_dir() else []
    return sorted(filter(_is_parameter, names))


def _check_old(directory: Path | Upload, files: set[str], *, overwrite: bool) -> None:
    """Check that only parameters will be removed, and that they may be; of a store nothing is removed."""
    old = old_parameters(directory)
    if old and not overwrite:
        problem = "the directory already contains parameters; pass overwrite=True to replace them"
        raise SaveError(problem, file=str(directory), found=old[0])
    for file in sorted(set(old) - files):
        if isinstance(directory, Upload) or not _is_one_tensor(str(directory / file)):
            problem = "a file in the directory would be removed and is not a parameter; move it first"
            raise SaveError(problem, file=str(directory), found=file)


def _is_one_tensor(path: str) -> bool:
    try:
        with OpenCheckpoint.open(path) as checkpoint:
            return isinstance(checkpoint.index.tree, Entry)
    except SluiceError:
        return False


def _no_check(directory: str) -> None:
    """Accept a directory without parameters, which is not a checkpoint."""


def _check_new(directory: str) -> None:
    """Check that readers will recognize the directory, given the other files that are kept."""
    try:
        surveyed = survey(LocalDirectory(directory), Limits())
    except SluiceError as error:
        raise SaveError(
            f"the directory would not be readable: {error.problem}", file=directory, found=error.found
        ) from error
    if surveyed.kind != "parameters":
        problem = "the directory contains a checkpoint of a different format, which readers prefer"
        raise SaveError(problem, file=directory, found=surveyed.files[0])
