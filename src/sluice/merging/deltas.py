"""Deltas: what changed between two steps of training, in the two formats that other libraries exchange.

A directory ``weight_v000007`` of slime, miles and sglang is a Hugging Face directory with a one-dimensional uint8
tensor for each changed tensor: a zstd frame of its bytes, ``xor`` those of the base; or, of ``overwrite``, a count, the
positions of changed bytes (each 4 bytes, little-endian), and those bytes. The metadata of each file maps names to
checksums of the new tensors; that of the index has ``version``, ``base_version``, ``delta_encoding``,
``compression_format`` and ``checksum_format``.

A file of TRL has ``NAME.indices`` and ``NAME.values``: positions in the flat tensor, ascending, and the new elements;
its metadata has ``sparse`` and ``model_version``. It has no checksums.

Refused: data that unpacks to more than the tensor has room for, indices outside it or out of order, values of a
different dtype, and results without the named checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import Struct

from sluice._errors import FormatError, IntegrityError, MismatchError, MissingFileError, UnsupportedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import flatten
from sluice.formats.manifest import Hasher, new_hash
from sluice.formats.protocol import read_whole
from sluice.formats.strict_json import decode_json
from sluice.records import Entry
from sluice.sources.opening import find_place

if TYPE_CHECKING:
    from sluice.sources.opening import PathOrAddress

__all__ = ["INDEX_FILE", "Delta", "DeltaStep", "check_chain", "new_checksum", "open_delta", "zstd"]

INDEX_FILE = "model.safetensors.index.json"

#: Bytes that are unpacked at a time.
_CHUNK_BYTES = 1 << 20

#: Positions of changed bytes or elements that are handled at a time.
_POSITIONS = _CHUNK_BYTES // 4


class DeltaStep(Struct, frozen=True, kw_only=True, eq=False):
    """Change of one tensor by one delta."""

    #: The delta, for messages.
    path: str
    #: ``"xor"``, ``"overwrite"`` or ``"sparse"``.
    encoding: str
    #: The packed bytes; or the indices and the values.
    inputs: tuple[Entry, ...]
    #: Kind and digits of the checksum of the result; empty without one.
    algorithm: str = ""
    checksum: str = ""

    def apply(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], name: str) -> None:
        """Change a contiguous tensor.

        Raises:
            FormatError: The delta is damaged.
            IntegrityError: The result does not have its checksum.
        """
        content = tensor.reshape(-1).view(torch.uint8)
        try:
            if self.encoding == "sparse":
                _scatter(tensor.reshape(-1), *inputs)
            else:
                unpack = _xor if self.encoding == "xor" else _overwrite
                unpack(content, inputs[0])
        except _DamagedError as error:
            raise FormatError(f"the delta is damaged: {error}", file=self.path, tensor=name) from error
        if self.algorithm:
            hasher = new_checksum(self.algorithm)
            hasher.update(content.numpy().data)
            if hasher.hexdigest() != self.checksum:
                raise IntegrityError(
                    "the patched tensor does not have the checksum of the delta",
                    file=self.path,
                    tensor=name,
                    expected=self.checksum,
                    found=hasher.hexdigest(),
                    advice="The delta is over another base, or one of the two is corrupt.",
                )


class Delta(Struct, frozen=True, kw_only=True, eq=False):
    """An open delta."""

    path: str
    #: Its version, and that of its base; empty if it does not name it.
    version: str
    base_version: str
    #: None if it changes nothing.
    checkpoint: OpenCheckpoint | None
    #: Changes by the name of the tensor.
    steps: Mapping[str, DeltaStep]


class _DamagedError(Exception):
    """A delta does not fit its tensor."""


class _Unpacked:
    """The content of a zstd frame, of which no more is unpacked than is read."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._reader = zstd().ZstdDecompressor().stream_reader(packed.numpy().data)

    def read(self, nbytes: int) -> bytearray:
        """Return the next bytes, exactly as many."""
        found = bytearray()
        while len(found) < nbytes:
            more = self._next(min(_CHUNK_BYTES, nbytes - len(found)))
            if not more:
                raise _DamagedError("it ends too early")
            found += more
        return found

    def end(self) -> None:
        """Refuse further bytes."""
        if self._next(1):
            raise _DamagedError("it unpacks to more bytes than the tensor has")

    def _next(self, nbytes: int) -> bytes:
        try:
            more: bytes = self._reader.read(nbytes)
        except (zstd().ZstdError, MemoryError) as error:
            raise _DamagedError(str(error)) from error
        return more


def _xor(content: torch.Tensor, packed: torch.Tensor) -> None:
    unpacked = _Unpacked(packed)
    for first in range(0, len(content), _CHUNK_BYTES):
        piece = content[first : first + _CHUNK_BYTES]
        piece.bitwise_xor_(torch.frombuffer(unpacked.read(len(piece)), dtype=torch.uint8))
    unpacked.end()


def _overwrite(content: torch.Tensor, packed: torch.Tensor) -> None:
    places, unpacked = _Unpacked(packed), _Unpacked(packed)  # twice: all positions are before the first byte
    count = int.from_bytes(places.read(4), "little")
    if count > len(content):
        raise _DamagedError("it changes more bytes than the tensor has")
    unpacked.read(4)
    steps = [min(_POSITIONS, count - first) for first in range(0, count, _POSITIONS)]
    for step in steps:
        unpacked.read(4 * step)
    for step in steps:
        positions = torch.frombuffer(places.read(4 * step), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        if int(positions.max()) >= len(content):
            raise _DamagedError("a position is outside the tensor")
        content[positions] = torch.frombuffer(unpacked.read(step), dtype=torch.uint8)
    unpacked.end()


def _scatter(flat: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    if values.dtype != flat.dtype:
        raise _DamagedError(f"its values are {values.dtype}, and the tensor is {flat.dtype}")
    if indices.dtype not in {torch.int32, torch.int64} or indices.dim() != 1 or indices.shape != values.shape:
        raise _DamagedError("its indices are not integers, as many as values")
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), flat.dtype)
    flat, values, last = flat.view(width), values.view(width), -1  # also of dtypes without an indexed copy
    for first in range(0, len(indices), _POSITIONS):
        block = indices[first : first + _POSITIONS].to(torch.int64)
        if int(block[0]) <= last or int(block[-1]) >= len(flat) or not bool((block[1:] > block[:-1]).all()):
            raise _DamagedError("its indices are outside the tensor, or do not ascend")
        flat[block] = values[first : first + _POSITIONS]
        last = int(block[-1])


def zstd() -> Any:
    """Return the library of zstd.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import zstandard  # an extra
    except ImportError as error:
        raise ImportError("packed deltas need the library zstandard: pip install 'sluice[delta]'") from error
    return zstandard


class _Adler32:
    """See ``Hasher``."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview | bytes) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(algorithm: str) -> Hasher:
    """Return a new checksum of a kind that deltas name; raises ``UnsupportedError`` and ``ImportError``."""
    if algorithm == "adler32":
        return _Adler32()
    if algorithm != "xxh3-128":
        raise UnsupportedError(f"checksums of the kind {algorithm!r} are not supported: xxh3-128 and adler32 are")
    return new_hash("xxh3_128")


class _IndexFile(Struct, frozen=True):
    """The members of an index file."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def open_delta(where: PathOrAddress, limits: Limits) -> Delta:
    """Open a delta; see ``Patched`` for errors."""
    index = _index_file(where, limits)
    if index is not None and not index.weight_map and "delta_encoding" in index.metadata:  # nothing changed
        return _delta(find_place(where).title, index.metadata, {}, None)
    checkpoint = OpenCheckpoint.open(where, limits=limits, encoding=TEXT_ENCODING)
    try:
        metadata = {**checkpoint.metadata, **(index.metadata if index else {})}
        if "delta_encoding" in metadata:
            steps = _packed(checkpoint, metadata)
        elif "sparse" in metadata:
            steps = _sparse(checkpoint)
        else:
            problem = "this is not a delta: its metadata has neither delta_encoding nor sparse"
            raise UnsupportedError(problem, file=checkpoint.path, advice="Load a whole checkpoint by its own path.")
        return _delta(checkpoint.path, metadata, steps, checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def _delta(
    path: str, metadata: Mapping[str, Any], steps: Mapping[str, DeltaStep], checkpoint: OpenCheckpoint | None
) -> Delta:
    version, base = (
        str(next((metadata[key] for key in keys if metadata.get(key) is not None), ""))
        for keys in (("version", "model_version"), ("base_version",))
    )
    return Delta(path=path, version=version, base_version=base, checkpoint=checkpoint, steps=steps)


def _index_file(where: PathOrAddress, limits: Limits) -> _IndexFile | None:
    directory = find_place(where).directory()
    if directory is None:
        return None
    try:
        if not limits.symlinks_outside:
            directory.check_inside(INDEX_FILE)
        source = directory.open(INDEX_FILE)
    except (FileNotFoundError, MissingFileError):
        return None
    with closing(source):
        return decode_json(read_whole(source, limits, "the index"), _IndexFile, "the index", source.path)


def _packed(checkpoint: OpenCheckpoint, metadata: Mapping[str, Any]) -> dict[str, DeltaStep]:
    encoding, algorithm = str(metadata["delta_encoding"]), str(metadata.get("checksum_format"))
    if encoding not in {"xor", "overwrite"} or metadata.get("compression_format") != "zstd":
        problem = f"deltas of {encoding} in {metadata.get('compression_format')} are not supported"
        raise UnsupportedError(problem, file=checkpoint.path, expected="xor or overwrite in zstd")
    try:
        new_checksum(algorithm)
    except UnsupportedError as error:
        error.file = checkpoint.path
        raise
    zstd()
    checksums = {name: text for file in checkpoint.open_files for name, text in file.index.metadata.items()}
    steps = {}
    for name, entry in flatten(checkpoint.index.tree, checkpoint.limits).items():
        if entry.dtype != "uint8" or len(entry.shape) != 1 or name not in checksums:
            raise FormatError("the delta of a tensor is not bytes with a checksum", file=checkpoint.path, tensor=name)
        steps[name] = DeltaStep(
            path=checkpoint.path,
            encoding=encoding,
            inputs=(entry,),
            algorithm=algorithm,
            checksum=checksums[name].lower(),
        )
    return steps


def _sparse(checkpoint: OpenCheckpoint) -> dict[str, DeltaStep]:
    entries = checkpoint.entries
    steps = {}
    for name in entries:
        tensor, _, own = name.rpartition(".")
        inputs = tuple(entries.get(f"{tensor}.{part}") for part in ("indices", "values"))
        if own not in {"indices", "values"} or None in inputs:
            problem = "the delta of a tensor is not its indices and its values"
            raise FormatError(problem, file=checkpoint.path, tensor=name)
        steps[tensor] = DeltaStep(path=checkpoint.path, encoding="sparse", inputs=cast("tuple[Entry, ...]", inputs))
    return steps


def check_chain(base: OpenCheckpoint, deltas: Sequence[Delta]) -> None:
    """Check that each delta is over what is before it, as far as they name versions.

    Raises:
        MismatchError: One is not.
    """
    before = base.metadata.get("model_version", "")
    for delta in deltas:
        wrong = before and delta.base_version and _number(before) != _number(delta.base_version)
        old, new = _number(before), _number(delta.version)
        if wrong or (isinstance(old, int) and isinstance(new, int) and 0 < new <= old):
            found = f"version {delta.version}" + f" over {delta.base_version}" * bool(delta.base_version)
            problem, expected = "the delta is not over the version before it", f"over version {before}"
            advice = "Pass deltas in the order of training, the oldest first, over their base."
            raise MismatchError(problem, file=delta.path, expected=expected, found=found, advice=advice)
        before = delta.version if new else before  # 0 stands for none in a sparse delta


def _number(version: str) -> int | str:
    return int(version) if version.isdecimal() and len(version) < 20 else version
