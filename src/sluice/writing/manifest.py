"""The manifest of a save: each tensor is hashed while it is written, so that the source is read once.

A writer announces the tensors of each stored item, a tensor or a storage (``expect``), and passes on all bytes of the
item in order (``consumer``). A tensor that is only a part of its storage is an item of its own, which is not written.

The manifest is renamed last, after the data: a crash between the two leaves an older manifest or none, which the next
verification reports as wrong or missing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping

from sluice._errors import SaveError
from sluice.formats.manifest import HashAlgorithm, Manifest, TensorHash, new_hash
from sluice.writing.durable.replacement import Replacement
from sluice.writing.safetensors import TensorOutline

__all__ = ["ManifestWriter", "manifest_writer", "replaces_checkpoint", "write_manifest"]


class ManifestWriter:
    """A manifest under construction; nothing is written before ``commit``, which follows the commit of the data.

    Example:
        >>> manifest = ManifestWriter("model.manifest.json", "sha256", overwrite=True)
        >>> manifest.expect("w", TensorOutline("uint8", (3,)))
        >>> manifest.consumer("w")(memoryview(b"abc"))
        >>> manifest.commit()
    """

    def __init__(self, path: str | os.PathLike[str], algorithm: HashAlgorithm, *, overwrite: bool) -> None:
        """Check the destination; nothing is changed.

        Args:
            path: The file to create or replace.
            algorithm: Name of the hash.
            overwrite: Whether an existing file may be replaced.

        Raises:
            SaveError: The path exists and may not or cannot be replaced, or its directory is read-only.
            ImportError: The library of the hash is not installed.
        """
        new_hash(algorithm)
        self._algorithm = algorithm
        self._file = Replacement(path, overwrite=overwrite)
        directory = os.path.dirname(os.path.realpath(self._file.path))
        if os.path.isdir(directory) and not os.access(directory, os.W_OK):  # fails now, not after the data is written
            raise SaveError("the directory is not writable", file=self._file.path)
        self._outlines: dict[str, TensorOutline] = {}
        self._hashes: dict[str, str] = {}
        self._names: defaultdict[Hashable, list[str]] = defaultdict(list)

    def refuse(self, files: Iterable[str]) -> None:
        """Raise ``ValueError`` if the manifest would replace one of these files, or an index."""
        if replaces_checkpoint(self._file.path, files):
            raise ValueError(f"the manifest would replace a file or the index of a checkpoint: {self._file.path}")

    def expect(self, name: str, outline: TensorOutline, stored: Hashable = None) -> None:
        """Announce a tensor whose bytes will be written.

        Args:
            name: Its dotted name in the finished checkpoint.
            outline: Its dtype and shape in the file.
            stored: Key of the item that holds its elements and nothing else; None if that is its name.
        """
        self._outlines[name] = outline
        self._names[name if stored is None else stored].append(name)

    def consumer(self, stored: Hashable) -> Callable[[memoryview], None] | None:
        """Return what takes all bytes of an item, in order; None if no tensor was announced for it."""
        names = self._names.pop(stored, None)
        if names is None:
            return None
        hasher, missing = new_hash(self._algorithm), self._outlines[names[0]].nbytes

        def take(piece: memoryview) -> None:
            nonlocal missing
            hasher.update(piece)
            missing -= len(piece)
            if not missing:
                self._hashes.update(dict.fromkeys(names, hasher.hexdigest()))

        if not missing:
            take(memoryview(b""))
        return take

    def repeat(self, ties: Mapping[str, str]) -> None:
        """Add further names of tensors that were hashed: ``{name: hashed name}``."""
        for name, hashed in ties.items():
            self._outlines[name], self._hashes[name] = self._outlines[hashed], self._hashes[hashed]

    def commit(self) -> None:
        """Write the manifest and rename it into place, after the data.

        Raises:
            SaveError: Bytes of a tensor were never passed on, or the operating system failed. The data stays.
        """
        for name in self._outlines.keys() - self._hashes.keys():
            raise SaveError("the tensor was not hashed completely", file=self._file.path, tensor=name)
        tensors = {
            name: TensorHash(dtype=outline.dtype, shape=outline.shape, hash=self._hashes[name])
            for name, outline in self._outlines.items()
        }
        write_manifest(Manifest(algorithm=self._algorithm, tensors=tensors), self._file)


def manifest_writer(
    path: str | None, algorithm: HashAlgorithm, destination: str, *, overwrite: bool
) -> ManifestWriter | None:
    """Return the manifest of a save to ``destination``; None if ``path`` is None.

    Raises:
        ValueError: The path is that of the checkpoint itself or of an index, or the algorithm is unknown.
        SaveError: Its directory does not exist and is not one that the save creates, or see ``ManifestWriter``.
    """
    if path is None:
        return None
    writer = ManifestWriter(path, algorithm, overwrite=overwrite)
    writer.refuse([destination])
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory) and not f"{os.path.realpath(destination)}{os.sep}".startswith(directory + os.sep):
        raise SaveError("the directory of the manifest does not exist", file=path)
    return writer


def replaces_checkpoint(path: str | os.PathLike[str], files: Iterable[str]) -> bool:
    """Return whether a new file would replace one of these, or the index of any checkpoint."""
    real = os.path.realpath(path)
    is_index = os.path.lexists(path) and real.endswith((".index.json", f"{os.sep}.metadata"))
    return is_index or real in map(os.path.realpath, files)


def write_manifest(manifest: Manifest, file: Replacement) -> None:
    """Write a manifest file atomically.

    Raises:
        SaveError: The operating system failed.
    """
    content = manifest.encode()
    try:
        with file:
            file.write_at(0, content)
            file.commit(nbytes=len(content))
    except SaveError as error:
        raise SaveError(
            f"the manifest was not written, the checkpoint is complete: {error.problem}",
            file=file.path,
            advice=error.advice,
        ) from error
