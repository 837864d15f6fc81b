"""Write the delta between two checkpoints, tensor by tensor: ``sluice.diff(a, b, patch=...)``."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import IO

import torch

from sluice._dtypes import dtype_name
from sluice._errors import MismatchError, SaveError
from sluice._messages import listed
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.merging.deltas import INDEX_FILE, new_checksum, zstd
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry
from sluice.writing.durable.directories import locked_directory
from sluice.writing.durable.partial_files import saving
from sluice.writing.durable.replacement import Replacement
from sluice.writing.safetensors import TensorOutline, lay_out_safetensors

__all__ = ["write_patch"]

_ALGORITHM = "xxh3-128"
_FILE = "model-00000-of-00001.safetensors"

#: Bytes that are copied, or elements that are compared, at a time.
_BLOCK = 1 << 20

#: The number of a step at the end of a name.
_VERSION = re.compile(r"[_-]v?(\d{1,12})(?:\.\w+)?$")


def write_patch(a: OpenCheckpoint, b: OpenCheckpoint, path: str, *, sparse: bool, versions: tuple[str, str]) -> None:
    """Write what makes ``b`` of ``a``: a directory of packed bytes, or a file of changed elements.

    Args:
        a: The base, or a part of it.
        b: The checkpoint after it.
        path: A directory, or with ``sparse`` a file; it does not exist.
        sparse: Whether to write elements and their indices.
        versions: Paths of the two checkpoints, whose names may end with numbers of steps.

    Raises:
        MismatchError: They do not have the same tensors.
        SaveError: The patch cannot be written.
        ImportError: A library is not installed.
    """
    pairs = _pairs(a, b)
    base, version = _version(versions[0]), _version(path) or _version(versions[1])
    if os.path.lexists(path):
        raise SaveError("the patch already exists", file=path, advice="Write it to a new place.")
    if sparse:
        folder = os.path.dirname(path) or "."
        with saving(path), tempfile.TemporaryFile(dir=folder) as data:
            found, _ = _written(_changed_elements(a, b, pairs), data)
            metadata = {"sparse": "True", "model_version": str(int(version or 0))}
            metadata["changed_params"] = str(len(found) // 2)
            _publish(path, data, found, metadata)
        return
    zstd()
    with locked_directory(path):
        with saving(path), tempfile.TemporaryFile(dir=path) as data:
            found, checksums = _written(_packed(a, b, pairs), data)
            if found:
                _publish(os.path.join(path, _FILE), data, found, checksums)
        kinds = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": _ALGORITHM}
        named = {name: text for name, text in (("version", version), ("base_version", base)) if text}
        index = json.dumps({"metadata": {**named, **kinds}, "weight_map": dict.fromkeys(found, _FILE)})
        try:
            with Replacement(os.path.join(path, INDEX_FILE), overwrite=False) as file:
                file.write_at(0, index.encode())
                file.commit()
        except BaseException:
            with suppress(OSError):
                os.unlink(os.path.join(path, _FILE))
            raise


def _version(path: str) -> str:
    found = _VERSION.search(path.rstrip("/"))
    return found[1].zfill(6) if found else ""


def _pairs(a: OpenCheckpoint, b: OpenCheckpoint) -> dict[str, tuple[Entry, Entry]]:
    """Return the entries of each tensor under one of its names."""
    ours, theirs = a.entries, b.entries
    problems = [f"only one has {name}" for name in ours.keys() ^ theirs.keys()]
    pairs: dict[Entry, tuple[str, Entry]] = {}
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        _, known = pairs.setdefault(one, (name, other))
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            problems.append(f"{name} is {one.dtype} {list(one.shape)}, and {other.dtype} {list(other.shape)}")
        elif one.composite is not None or other.composite is not None:
            problems.append(f"{name} is {one.layout}")
        elif known != other:
            problems.append(f"{name} is tied in one of them")
    if problems:
        problem = listed("the checkpoints do not have the same tensors", sorted(problems))
        raise MismatchError(problem, advice="Save the new checkpoint itself: a patch holds new values only.")
    return {name: (one, other) for one, (name, other) in sorted(pairs.items(), key=lambda item: item[1][0])}


def _both(
    a: OpenCheckpoint, b: OpenCheckpoint, pairs: Mapping[str, tuple[Entry, Entry]]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    with CheckpointReader(a) as left, CheckpointReader(b) as right:
        for name, (one, other) in pairs.items():
            yield name, left.read([one])[0].reshape(-1), right.read([other])[0].reshape(-1)


_Item = tuple[str, str, tuple[int, ...], Iterable[bytes | memoryview], str]


def _packed(a: OpenCheckpoint, b: OpenCheckpoint, pairs: Mapping[str, tuple[Entry, Entry]]) -> Iterator[_Item]:
    packer = zstd().ZstdCompressor(level=1)
    for name, old, new in _both(a, b, pairs):
        changes, content = old.view(torch.uint8), new.view(torch.uint8)
        del old, new
        if not torch.equal(changes, content):
            hasher = new_checksum(_ALGORITHM)
            hasher.update(content.numpy().data)
            content = changes.bitwise_xor_(content)  # frees the new tensor: the packed bytes may be as many
            packed = packer.compress(content.numpy().data)
            yield name, "uint8", (len(packed),), [packed], hasher.hexdigest()
            del packed
        del changes, content  # before the next two are read


def _changed_elements(
    a: OpenCheckpoint, b: OpenCheckpoint, pairs: Mapping[str, tuple[Entry, Entry]]
) -> Iterator[_Item]:
    for name, old, new in _both(a, b, pairs):
        content, changes = (each.view(torch.uint8).view(len(new), new.element_size()) for each in (new, old))
        changes.bitwise_xor_(content)
        shape = (sum(map(len, _places(changes))),)
        if shape[0]:
            dtype = torch.int32 if len(new) < 1 << 31 else torch.int64
            indices = (places.to(dtype).view(torch.uint8).numpy().data for places in _places(changes))
            yield f"{name}.indices", dtype_name(dtype), shape, indices, ""
            values = (content[places].reshape(-1).numpy().data for places in _places(changes))
            yield f"{name}.values", dtype_name(new.dtype), shape, values, ""
        del old, new, content, changes  # before the next two are read


def _places(changes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the positions of rows that are not zero, a block at a time: all may be larger than the tensor."""
    for first in range(0, len(changes), _BLOCK):
        yield changes[first : first + _BLOCK].any(dim=1).nonzero().reshape(-1) + first


def _written(items: Iterator[_Item], data: IO[bytes]) -> tuple[dict[str, tuple[TensorOutline, int]], dict[str, str]]:
    """Write the bytes of tensors to a temporary file; return their places there, and their checksums."""
    found, checksums = {}, {}
    for name, dtype, shape, content, checksum in items:
        found[name] = TensorOutline(dtype, shape), data.tell()
        checksums[name] = checksum
        data.writelines(content)
        del content
    return found, checksums


def _publish(
    path: str, data: IO[bytes], found: Mapping[str, tuple[TensorOutline, int]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with the bytes of a temporary file."""
    layout = lay_out_safetensors({name: outline for name, (outline, _) in found.items()}, metadata)
    with Replacement(path, overwrite=False) as file:
        file.write_at(0, layout.header)
        for name, _, at in layout.tensors:
            outline, start = found[name]
            data.seek(start)
            for first in range(0, outline.nbytes, _BLOCK):
                file.write_at(at + first, data.read(min(_BLOCK, outline.nbytes - first)))
        file.commit()
