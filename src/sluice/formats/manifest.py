"""Manifests: JSON files with the dtype, the shape and a hash of every tensor of a checkpoint.

Layout::

    {"format": "sluice-manifest", "version": 1, "algorithm": "sha256",
     "tensors": {"NAME": {"dtype":"float32","shape":[2,3],"hash":"HEX"}, ...}}

``NAME`` is the dotted name that ``sluice.open`` shows. The hash is that of the bytes of a contiguous tensor: the
elements in row-major order, little-endian, without gaps, with conjugation and negation applied. It depends neither on
the file format nor on the layout of the tensor in its storage. A sparse or quantized tensor also has a ``"layout"``
(``"sparse_coo"``, ``"quantized"``), and its hash covers its component tensors in order: indices, then values;
integers, then scales and zero points. Components that are plain numbers follow as float64.

Refused: anything but strict JSON in UTF-8 (``strict_json``), fields of other types, other versions, unknown algorithms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Literal, Protocol, get_args

import msgspec
from msgspec import Meta, Struct, structs

from sluice._errors import FormatError, MissingFileError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.protocol import read_whole
from sluice.formats.strict_json import decode_json, without_strings
from sluice.records import collector_paused
from sluice.sources.opening import find_place
from sluice.sources.remote_names import missing_advice

__all__ = ["HashAlgorithm", "Hasher", "Manifest", "TensorHash", "new_hash", "parse_manifest", "read_manifest"]

#: ``sha256`` also detects deliberate changes; ``xxh3_128`` (``pip install 'sluice[hash]'``) detects only damage, but is
#: several times as fast.
HashAlgorithm = Literal["sha256", "xxh3_128"]

_FORMAT, _VERSION = "sluice-manifest", 1


class Hasher(Protocol):
    """A hash under construction, as in ``hashlib`` and ``xxhash``."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Add the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, in hexadecimal digits."""
        ...


class TensorHash(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The expected dtype, shape and hash of one tensor."""

    #: Name of its dtype, as torch spells it: ``"float32"``.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    #: ``"strided"`` for a dense tensor, else ``"sparse_coo"``, ``"quantized"``, ...
    layout: str = "strided"
    #: The hash of its elements, in hexadecimal digits.
    hash: str


class Manifest(Struct, frozen=True, kw_only=True):
    """The expected dtype, shape and hash of every tensor of a checkpoint."""

    #: Name of the hash.
    algorithm: HashAlgorithm
    #: The tensors by their dotted names.
    tensors: Mapping[str, TensorHash]

    def encode(self) -> bytes:
        """Return the content of the file, with one line per tensor."""
        lines = [f"{json.dumps(name)}: {msgspec.json.encode(each).decode()}" for name, each in self.tensors.items()]
        head = f'{{"format": "{_FORMAT}", "version": {_VERSION}, "algorithm": "{self.algorithm}", "tensors": {{'
        return (head + ",".join(f"\n  {line}" for line in lines) + "\n}}\n").encode()


class _Kind(Struct):
    """The members of a manifest that are decoded first."""

    format: str = ""
    version: int = 0
    algorithm: str = ""


def new_hash(algorithm: HashAlgorithm) -> Hasher:
    """Return a new hash.

    Raises:
        ImportError: The hash needs a library that is not installed.
        ValueError: The algorithm is unknown.
    """
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm not in get_args(HashAlgorithm):
        raise ValueError(f"unknown hash {algorithm!r}: one of {', '.join(get_args(HashAlgorithm))}")
    try:
        import xxhash
    except ImportError as error:
        raise ImportError("xxh3_128 needs the library xxhash: pip install 'sluice[hash]'") from error
    return xxhash.xxh3_128()


def read_manifest(path: str, limits: Limits) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: It does not exist, or is not a manifest.
        ReadError: The operating system failed a read.
    """
    try:
        opened = find_place(path).open_file()
    except MissingFileError as error:
        error.advice = missing_advice(path, checkpoint=False)
        raise
    with closing(opened) as source:
        data = read_whole(source, limits, "the manifest")
    with collector_paused():
        return parse_manifest(data, path, limits)


def parse_manifest(data: bytes, path: str, limits: Limits) -> Manifest:
    """Check the bytes of a manifest; raises as ``read_manifest`` does."""
    kind = decode_json(data, _Kind, "the manifest", path)
    if kind.format != _FORMAT:
        raise UnsupportedError("this is JSON text, but not a manifest", file=path, expected=f'"format": "{_FORMAT}"')
    if kind.version != _VERSION:
        raise UnsupportedError("unsupported manifest version", file=path, expected=_VERSION, found=kind.version)
    if kind.algorithm not in get_args(HashAlgorithm):
        expected, found = f"one of {', '.join(get_args(HashAlgorithm))}", kind.algorithm
        raise UnsupportedError("unknown hash algorithm in the manifest", file=path, expected=expected, found=found)
    manifest = decode_json(data, Manifest, "the manifest", path)
    check_limit(limits, "entries", len(manifest.tensors), "the manifest", file=path)
    if without_strings(data).count(b"{") != 2 + len(manifest.tensors):
        raise FormatError("a name is given twice in the manifest", file=path)
    tensors = {name: structs.replace(each, hash=each.hash.lower()) for name, each in manifest.tensors.items()}
    return structs.replace(manifest, tensors=tensors)
