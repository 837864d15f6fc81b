"""The manifest of a save: each tensor is hashed while its bytes pass to the file, so that the source is read once.

A writer says of everything that it stores which tensors lie in it (``expect``) and hands over each piece that it
writes, in order (``in_order``) or in any order and from any thread (``piece``). What is stored can be one tensor, or a
storage with views. A tensor whose elements do not follow each other in what is stored is given in pieces of its own
(``add``). Hashes need their bytes in order: a piece that comes before its turn is looked up in the file under
construction when its turn has come, which takes no memory, and no disk as it was written a moment ago.

The manifest gets its name last, after the data: a crash between the two leaves an older manifest or none, which the
next check finds to be wrong or missing, but never a wrong one that fits.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

from sluice._errors import SaveError
from sluice.formats.manifest import HashAlgorithm, Hasher, Manifest, TensorHash, new_hash
from sluice.writing.durable.replacement import Replacement

__all__ = ["ManifestWriter", "manifest_writer", "write_manifest"]

#: Bytes that are looked up at once.
_READ_BACK_BYTES = 1 << 20

#: Returns bytes of something stored, from an offset in it on.
ReadBack = Callable[[int, int], bytes]


class _HashedRange:
    """Bytes of something stored that are the elements of one or more tensors, hashed in order."""

    __slots__ = ("_at", "_early", "_end", "_hasher", "_lock", "names", "start")

    def __init__(self, start: int, end: int, hasher: Hasher) -> None:
        self.start = start
        self.names: list[str] = []
        self._end = end
        self._hasher = hasher
        self._at = start
        self._early: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def take(self, at: int, data: memoryview, read_back: ReadBack | None) -> None:
        """Hash a piece that begins at byte ``at`` of what is stored, or remember that it came."""
        first, last = max(at, self.start), min(at + len(data), self._end)
        if first >= last:
            return
        with self._lock:
            if first != self._at:
                heapq.heappush(self._early, (first, last))
                return
            self._hasher.update(data[first - at : last - at])
            self._at = last
            while self._early and self._early[0][0] == self._at:
                self._catch_up(heapq.heappop(self._early)[1], read_back)

    def _catch_up(self, end: int, read_back: ReadBack | None) -> None:
        assert read_back is not None  # pieces of ``in_order`` do
        while self._at < end:
            data = read_back(self._at, min(_READ_BACK_BYTES, end - self._at))
            self._hasher.update(data)
            self._at += len(data)

    def hexdigest(self) -> str | None:
        """Return the hash, or None while bytes are missing."""
        return self._hasher.hexdigest() if self._at == self._end else None


class ManifestWriter:
    """A manifest under construction. ``commit`` it after the data; without that, nothing has happened.

    Example:
        >>> manifest = ManifestWriter("model.manifest.json", "sha256", overwrite=True)
        >>> manifest.expect("w", dtype="uint8", shape=(3,), nbytes=3)
        >>> manifest.in_order("w")(memoryview(b"abc"))
        >>> manifest.done("w")
        >>> manifest.commit()
    """

    def __init__(self, path: str | os.PathLike[str], algorithm: HashAlgorithm, *, overwrite: bool) -> None:
        """Look at what is there; nothing is changed.

        Args:
            path: The file to make or replace.
            algorithm: Name of the hash.
            overwrite: Whether a file that exists may be replaced.

        Raises:
            SaveError: Something is there that may not or can not be replaced.
            ImportError: The hash needs a library that is not installed.
        """
        new_hash(algorithm)
        self._algorithm = algorithm
        self._file = Replacement(path, overwrite=overwrite)
        directory = os.path.dirname(os.path.realpath(self._file.path))
        if os.path.isdir(directory) and not os.access(directory, os.W_OK):  # found now, not after the data
            raise SaveError("no file can be made in this directory", file=self._file.path)
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._hashes: dict[str, str] = {}
        self._ranges: defaultdict[Hashable, dict[tuple[int, int], _HashedRange]] = defaultdict(dict)

    def expect(
        self, name: str, *, dtype: str, shape: Iterable[int], nbytes: int, stored: Hashable = None, start: int = 0
    ) -> None:
        """Announce a tensor whose bytes will pass.

        Args:
            name: Its dotted name in the finished checkpoint.
            dtype: Its dtype there.
            shape: Its sizes.
            nbytes: Bytes of its elements.
            stored: What it lies in; None for something that holds it alone and has its name.
            start: Its first byte there.
        """
        self._kinds[name] = (dtype, tuple(shape))
        ranges = self._ranges[name if stored is None else stored]
        end = start + nbytes
        ranges.setdefault((start, end), _HashedRange(start, end, new_hash(self._algorithm))).names.append(name)

    def in_order(self, stored: Hashable) -> Callable[[memoryview], None]:
        """Return what takes all bytes of something that is stored, piece by piece in order; then call ``done``."""
        at = 0

        def take(piece: memoryview) -> None:
            nonlocal at
            self._take(stored, at, piece, None)
            at += len(piece)

        return take

    def piece(self, stored: Hashable, at: int, data: memoryview, read_back: ReadBack) -> None:
        """Take a piece of something that is stored, once it is written; call ``done`` after the last.

        Args:
            stored: What it belongs to.
            at: Its first byte there.
            data: Its bytes.
            read_back: Returns bytes of what is stored that were written before.
        """
        self._take(stored, at, data, read_back)

    def done(self, stored: Hashable) -> None:
        """Keep the hashes of what lies in something that is stored, and forget the rest of it."""
        for found in self._ranges.pop(stored, {}).values():
            digest = found.hexdigest()
            if digest is not None:
                self._hashes.update(dict.fromkeys(found.names, digest))

    def _take(self, stored: Hashable, at: int, data: memoryview, read_back: ReadBack | None) -> None:
        for found in self._ranges[stored].values() if stored in self._ranges else ():
            found.take(at, data, read_back)

    def add(self, name: str, *, dtype: str, shape: Iterable[int], pieces: Iterable[memoryview]) -> None:
        """Hash a tensor whose elements come in pieces, in row-major order."""
        hasher = new_hash(self._algorithm)
        for piece in pieces:
            hasher.update(piece)
        self._kinds[name] = (dtype, tuple(shape))
        self._hashes[name] = hasher.hexdigest()

    def commit(self) -> None:
        """Write the manifest and give it its name; the data has its own already.

        Raises:
            SaveError: The bytes of a tensor never passed, or the operating system failed. The data stays.
        """
        for name in self._kinds.keys() - self._hashes.keys():
            raise SaveError("the manifest has no hash of this tensor", file=self._file.path, tensor=name)
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
    """Return the manifest that goes with a save to ``destination``, or None where none is wanted.

    Raises:
        ValueError: It would have the name of the checkpoint itself, or the algorithm is unknown.
        SaveError: See ``ManifestWriter``.
    """
    if path is None:
        return None
    if os.path.realpath(path) == os.path.realpath(destination):
        raise ValueError("the manifest needs a name of its own, not that of the checkpoint")
    return ManifestWriter(path, algorithm, overwrite=overwrite)


def write_manifest(manifest: Manifest, file: Replacement) -> None:
    """Write a manifest and give it its name.

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
            f"the manifest is not written, the checkpoint is intact: {error.problem}", file=file.path
        ) from error
