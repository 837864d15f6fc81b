"""Contents of the tensors of a load, as short texts that are equal only if their bytes are; nothing is read for it.

A storage is known by the hash that a manifest has for the tensor that fills it, else by the CRC-32 of its record in a
zip file, else by its file (inode and times; address and strong ETag or version of a remote object) and its place in
it. So after a file without checksums was written anew, all of its tensors count as changed; so they do at any time if
nothing shows that a file is the same, as in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from sluice.entries.tree import walk
from sluice.formats.manifest import Manifest
from sluice.records import Entry, Index, Request

__all__ = ["request_contents", "version_of"]

#: Items of metadata that name a version, the first of which counts. Only in safetensors files the second is not that of
#: the format.
_VERSIONS = ("model_version", "version")

#: Size of a digest, in bytes: two of 100 million contents are equal by accident once in 10**22 cases.
_DIGEST_BYTES = 16


def request_contents(
    index: Index, requests: Iterable[Request], manifest: Manifest | None = None, *, of_index: bool = True
) -> dict[str, str]:
    """Return the digest of the content of each request, by name.

    Args:
        index: The checkpoint.
        requests: The tensors of a load.
        manifest: Hashes of the tensors of the checkpoint, if the caller has them.
        of_index: Whether the manifest is that of the checkpoint. If not, what it does not name is unknown.
    """
    storage = _storage_contents(index, {} if manifest is None else _by_storage(index, manifest), of_index=of_index)
    found = {}
    for request in requests:
        entry = request.entry
        parts = [(part.start, part.entry) for part in entry.parts] or [((), piece) for piece in entry.pieces]
        text = repr([entry.layout, entry.shape, *((start, _view(piece, storage)) for start, piece in parts)])
        found[request.name] = blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return found


def version_of(index: Index, contents: Mapping[str, str]) -> str:
    """Return the version that the metadata of a checkpoint names, or a digest of its contents."""
    keys = _VERSIONS if "safetensors" in index.format else _VERSIONS[:1]
    named = next((index.metadata[key] for key in keys if key in index.metadata), None)
    return named or blake2b(repr(sorted(contents.items())).encode(), digest_size=_DIGEST_BYTES // 2).hexdigest()


def _view(entry: Entry, storage: Callable[[int], str]) -> tuple[object, ...]:
    where = storage(entry.storage) if entry.constant is None else entry.constant
    return where, entry.storage_offset, entry.shape, entry.stride, repr(entry.elements)


def _storage_contents(index: Index, hashes: Mapping[int, str], *, of_index: bool) -> Callable[[int], str]:
    unknown = f"unknown {os.urandom(_DIGEST_BYTES).hex()}"
    files = [file.describe() if file.identity.exact and of_index else unknown for file in index.files]
    offsets = [storage.offset for storage in index.storages]

    def content(position: int) -> str:
        if position in hashes:
            return hashes[position]
        storage = index.storages[position]
        if of_index and index.crcs and (crc := index.crcs[position]):
            return f"CRC-32 {crc:08x} of {storage.nbytes}"
        return f"{files[storage.file]} at {offsets[position]}"

    return content


def _by_storage(index: Index, manifest: Manifest) -> dict[int, str]:
    """Return the hash of each storage that one tensor of the manifest fills, in order."""
    found = {}
    for name, entry in walk(index.tree):
        known = manifest.tensors.get(name)
        if known is None or entry.storage < 0:
            continue
        begin, end = entry.byte_span
        if (begin, end) == (0, index.storages[entry.storage].nbytes) and entry.nbytes == end:
            found[entry.storage] = f"{manifest.algorithm} {known.hash} {known.dtype}"
    return found
