"""Manifests: JSON files with the dtype, the shape and a hash of every tensor of a checkpoint.

Layout::

    {"format": "sluice-manifest", "version": 1, "algorithm": "sha256",
     "tensors": {"NAME": {"dtype": "float32", "shape": [2, 3], "hash": "HEX"}, ...}}

``NAME`` is the dotted name that ``sluice.open`` shows. The hash is that of the bytes of a contiguous tensor: the
elements in row-major order, little-endian, without gaps, with conjugation and negation applied. It depends neither on
the file format nor on the layout of the tensor in its storage. A sparse or quantized tensor also has a ``"layout"``
(``"sparse_coo"``, ``"quantized"``), and its hash covers its component tensors in order: indices, then values;
integers, then scales and zero points. Components that are plain numbers follow as float64.

Refused: anything but strict JSON in UTF-8, names or fields of other types, other versions, unknown algorithms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Annotated, Literal, Protocol, cast, get_args

from msgspec import Meta, Struct, ValidationError, convert, structs

from sluice._errors import FormatError, LimitError, MissingFileError, UnsupportedError
from sluice._options import Limits
from sluice.formats.strict_json import kind_of, parse_strict_json
from sluice.records.bulk import collector_paused
from sluice.sources.opening import open_source
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


class TensorHash(Struct, frozen=True, kw_only=True):
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
        lines = [
            f"{json.dumps(name)}: {json.dumps(_fields(tensor), separators=(', ', ': '))}"
            for name, tensor in self.tensors.items()
        ]
        head = f'{{"format": "{_FORMAT}", "version": {_VERSION}, "algorithm": "{self.algorithm}", "tensors": {{'
        return (head + ",".join(f"\n  {line}" for line in lines) + "\n}}\n").encode()


def _fields(tensor: TensorHash) -> dict[str, object]:
    return {name: value for name, value in structs.asdict(tensor).items() if name != "layout" or value != "strided"}


def new_hash(algorithm: HashAlgorithm) -> Hasher:
    """Return a new hash.

    Raises:
        ImportError: The hash needs a library that is not installed.
        ValueError: The algorithm is unknown.
    """
    return _maker(algorithm)()


def _maker(algorithm: str) -> Callable[[], Hasher]:
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm not in get_args(HashAlgorithm):
        raise ValueError(f"unknown hash {algorithm!r}: one of {', '.join(get_args(HashAlgorithm))}")
    try:
        import xxhash
    except ImportError as error:
        raise ImportError("xxh3_128 needs the library xxhash: pip install 'sluice[hash]'") from error
    return xxhash.xxh3_128


def read_manifest(path: str, limits: Limits) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: It does not exist, or is not a manifest.
        ReadError: The operating system failed a read.
    """
    try:
        opened = open_source(path)
    except MissingFileError as error:
        error.advice = missing_advice(path, checkpoint=False)
        raise
    with closing(opened) as source:
        nbytes = source.identity.nbytes
        if nbytes > limits.header_bytes:
            expected = f"at most {limits.header_bytes} bytes (header_bytes)"
            raise LimitError("the manifest is too large", file=path, expected=expected, found=nbytes)
        data = source.read_at(0, nbytes)
    with collector_paused():
        return parse_manifest(data, path, limits)


def parse_manifest(data: bytes, path: str, limits: Limits) -> Manifest:
    """Check the bytes of a manifest; raises as ``read_manifest`` does."""
    try:
        content = parse_strict_json(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the manifest is not strict JSON: {error}", file=path) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UnsupportedError("this is JSON text, but not a manifest", file=path, expected=f'"format": "{_FORMAT}"')
    version, algorithm, tensors = (content.get(field) for field in ("version", "algorithm", "tensors"))
    if type(version) is not int or version != _VERSION:
        raise UnsupportedError("unsupported manifest version", file=path, expected=_VERSION, found=version)
    if algorithm not in get_args(HashAlgorithm):
        expected = f"one of {', '.join(get_args(HashAlgorithm))}"
        raise UnsupportedError("unknown hash algorithm in the manifest", file=path, expected=expected, found=algorithm)
    if not isinstance(tensors, dict):
        raise FormatError("the field tensors of the manifest is not a JSON object", file=path, found=kind_of(tensors))
    if len(tensors) > limits.entries:
        expected = f"at most {limits.entries} (entries)"
        raise LimitError("the manifest has too many tensors", file=path, expected=expected, found=len(tensors))
    return Manifest(
        algorithm=cast("HashAlgorithm", algorithm),
        tensors={name: _tensor(name, value, path) for name, value in tensors.items()},
    )


def _tensor(name: str, value: object, path: str) -> TensorHash:
    try:
        found = convert(value, TensorHash)
    except ValidationError as error:
        expected = "strings dtype and hash, and a list of sizes in shape"
        problem = "the manifest entry for this tensor lacks a field, or a field has the wrong type"
        raise FormatError(problem, file=path, tensor=name, expected=expected, found=str(error)) from error
    return structs.replace(found, hash=found.hash.lower())
