"""The manifest of a save: each tensor is hashed while it is written, so that the source is read once.

A writer announces the tensors of each stored item, a tensor or a storage with views (``expect``), and passes on all
bytes of the item in order (``in_order``). A tensor whose elements are not contiguous in its storage is an item of its
own, which is not written.

The manifest is renamed last, after the data: a crash between the two leaves an older manifest or none, which the next
verification reports as wrong or missing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping

from sluice._errors import SaveError
from sluice.formats.manifest import HashAlgorithm, Hasher, Manifest, TensorHash, new_hash
from sluice.writing.durable.replacement import Replacement

__all__ = ["ManifestWriter", "manifest_writer", "write_manifest"]


class _HashedRange:
    """Byte range of a stored item that holds the elements of one or more tensors, hashed in order."""

    __slots__ = ("_at", "_end", "_hasher", "names", "start")

    def __init__(self, start: int, end: int, hasher: Hasher) -> None:
        self.start = start
        self.names: list[str] = []
        self._end = end
        self._hasher = hasher
        self._at = start

    def take(self, at: int, data: memoryview) -> None:
        """Hash a piece that begins at byte ``at`` of the item; pieces come in order."""
        first, last = max(at, self.start), min(at + len(data), self._end)
        if first < last:
            self._hasher.update(data[first - at : last - at])
            self._at = last

    def hexdigest(self) -> str | None:
        """Return the hash, or None while bytes are missing."""
        return self._hasher.hexdigest() if self._at == self._end else None


class ManifestWriter:
    """A manifest under construction; nothing is written before ``commit``, which follows the commit of the data.

    Example:
        >>> manifest = ManifestWriter("model.manifest.json", "sha256", overwrite=True)
        >>> manifest.expect("w", dtype="uint8", shape=(3,), nbytes=3)
        >>> manifest.in_order("w")(memoryview(b"abc"))
        >>> manifest.done("w")
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
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._hashes: dict[str, str] = {}
        self._ranges: defaultdict[Hashable, dict[tuple[int, int], _HashedRange]] = defaultdict(dict)

    def expect(
        self, name: str, *, dtype: str, shape: Iterable[int], nbytes: int, stored: Hashable = None, start: int = 0
    ) -> None:
        """Announce a tensor whose bytes will be written.

        Args:
            name: Its dotted name in the finished checkpoint.
            dtype: Its dtype in the file.
            shape: Size of each dimension, in elements.
            nbytes: Size of its elements, in bytes.
            stored: Key of the item that holds it; None for an item with this tensor only, whose key is its name.
            start: Its first byte in the item.
        """
        self._kinds[name] = (dtype, tuple(shape))
        ranges = self._ranges[name if stored is None else stored]
        end = start + nbytes
        ranges.setdefault((start, end), _HashedRange(start, end, new_hash(self._algorithm))).names.append(name)

    def in_order(self, stored: Hashable) -> Callable[[memoryview], None]:
        """Return a consumer of all bytes of an item, in order; call ``done`` after the last."""
        at = 0

        def take(piece: memoryview) -> None:
            nonlocal at
            for hashed in self._ranges[stored].values() if stored in self._ranges else ():
                hashed.take(at, piece)
            at += len(piece)

        return take

    def done(self, stored: Hashable) -> None:
        """Finish the hashes of an item and release its state."""
        for hashed in self._ranges.pop(stored, {}).values():
            digest = hashed.hexdigest()
            if digest is not None:
                self._hashes.update(dict.fromkeys(hashed.names, digest))

    def repeat(self, ties: Mapping[str, str]) -> None:
        """Add further names of tensors that were hashed: ``{name: hashed name}``."""
        for name, hashed in ties.items():
            self._kinds[name], self._hashes[name] = self._kinds[hashed], self._hashes[hashed]

    def commit(self) -> None:
        """Write the manifest and rename it into place, after the data.

        Raises:
            SaveError: Bytes of a tensor were never passed on, or the operating system failed. The data stays.
        """
        for name in self._kinds.keys() - self._hashes.keys():
            raise SaveError("the tensor was not hashed completely", file=self._file.path, tensor=name)
        tensors = {
            name: TensorHash(dtype=dtype, shape=shape, hash=self._hashes[name])
            for name, (dtype, shape) in self._kinds.items()
        }
        write_manifest(Manifest(algorithm=self._algorithm, tensors=tensors), self._file)


def manifest_writer(
    path: str | os.PathLike[str] | None,
    algorithm: HashAlgorithm,
    destination: str | os.PathLike[str],
    *,
    overwrite: bool,
) -> ManifestWriter | None:
    """Return the manifest of a save to ``destination``; None if ``path`` is None.

    Raises:
        ValueError: The path is that of the checkpoint itself, or the algorithm is unknown.
        SaveError: See ``ManifestWriter``.
    """
    if path is None:
        return None
    if os.path.realpath(path) == os.path.realpath(destination):
        raise ValueError("the manifest and the checkpoint have the same path")
    return ManifestWriter(path, algorithm, overwrite=overwrite)


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
