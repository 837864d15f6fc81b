"""The legacy format of ``torch.save``: before torch 1.6, and later with ``_use_new_zipfile_serialization=False``.

Layout::

    pickle    0x1950a86a20f9469cfc6c, the magic number
    pickle    1001, the protocol version
    pickle    {"protocol_version": 1001, "little_endian": True, "type_sizes": {...}}
    pickle    the object; its storages are persistent ids
    pickle    [KEY, KEY, ...]: the keys of the storages, in data order
    storages  for each key, the number of elements as a signed 8-byte integer, then the elements; little-endian on every
              machine, except that big-endian machines exchange the real and imaginary parts of complex numbers

A file may hold several objects in sequence; ``Index.end`` is the end of the first. The file contains no offsets: the
offset of a storage follows from the declared sizes of the storages before it. Indexing reads the pickles
(``unpickle_at``) and the element count before each storage, which must equal the declared count. Counts less than
16 KiB apart are read together with the data between them. Where requests are expensive, a count is checked when the
data after it is read. Data is usually not aligned to its element size, because it starts where the pickles end.

Permitted globals and persistent ids that only legacy files use:

- persistent id ``("storage", class, key, location, elements, None)``: a ``StorageReference``
- persistent id ``("module", class, file, source)``: the class, as an inert leaf
- ``torch.FloatTensor()`` and the state ``(storage, offset, size, stride)``, from torch before 0.4: an ``Entry``
- ``torch.nn.Parameter(tensor)`` and ``(requires_grad, volatile, hooks)``, or ``torch.nn.Parameter()`` and ``(tensor,
  gradient, hooks, requires_grad, volatile)``: the ``Entry`` of the tensor, as a parameter; the gradient is dropped

Unsupported: views of storages, of which torch before 0.4 wrote a description in place of None; untyped storages, which
torch writes (for dtypes such as ``float8_e5m2``) but fails to read; complex storages from a big-endian machine, whose
real and imaginary parts torch exchanges.

Limits: those of the inert unpickler, ``Limits.header_bytes`` for each pickle, and ``Limits.entries`` storages.

Refused, although torch does not check it: a storage that is declared but not in the list of keys, or the reverse; a key
that is listed twice; a file that is also a tar archive (as torch 0.1 wrote them)
whose first member has the magic number as its name.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import add
from reprlib import repr as short_repr
from typing import Any

from sluice._errors import TORCH_MAY_READ, FormatError, TruncatedError, UnsafeContentError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.detection import LEGACY_MAGIC
from sluice.formats.pickles.unpickler import Allowlist, Constructor, PendingObject, unpickle_at
from sluice.formats.protocol import LocatedByIndex
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.plain_values import from_bytes
from sluice.formats.torch_save.storages import StorageKind, StorageReference
from sluice.formats.torch_save.tree_limits import check_object
from sluice.records import Entry, FileRecord, Index, Opaque, Storage, collector_paused
from sluice.sources.protocol import Source, checks_with_data
from sluice.sources.ranges import read_ranges

__all__ = ["TorchLegacyFormat"]

_PROTOCOL_VERSION = 1001

#: Number of elements, before the data of each storage.
_COUNT = struct.Struct("<q")

#: Maximum bytes of data to read between two counts. With eight threads, a larger gap costs more than a separate read.
_COUNT_GAP_BYTES = 16 << 10

#: ``("storage", class, key, location, elements, view)``
_IDENTITY_FIELDS = 6

#: Tensor classes of torch before 0.4. Classes of accelerator tensors stay inert: torch needs the accelerator for them.
_TENSOR_CLASSES = {
    "DoubleTensor": "float64",
    "FloatTensor": "float32",
    "HalfTensor": "float16",
    "LongTensor": "int64",
    "IntTensor": "int32",
    "ShortTensor": "int16",
    "CharTensor": "int8",
    "ByteTensor": "uint8",
}

_UNTYPED = "torch.storage.UntypedStorage"


class TorchLegacyFormat(LocatedByIndex):
    """The legacy format of ``torch.save``; see ``Format``."""

    name = "torch-legacy"

    def read_index(self, source: Source, limits: Limits) -> Index:
        with collector_paused():
            start, little_endian = _check_preamble(source, limits)
            pickle_bytes = min(source.identity.nbytes, limits.header_bytes)
            allowlist = _LegacyAllowlist(limits, pickle_bytes, little_endian=little_endian)
            tree, unpickler, end = unpickle_at(source, start, allowlist, limits, encoding=self.encoding)
            tree, notes = check_object(tree, unpickler, limits, source.path)
            if allowlist.unknown_storages:
                problem = "storages of a class that sluice does not know, so the places of the others are unknown too"
                found = ", ".join(sorted(allowlist.unknown_storages)[:5])
                raise UnsupportedError(problem, file=source.path, found=found, advice=TORCH_MAY_READ)
            order, data_start = _read_order(source, end, allowlist.storages, limits)
            offsets, end = _check_counts(source, order, data_start)
            return Index(
                format=self.name,
                files=(FileRecord(path=source.path, identity=source.identity),),
                storages=_storages(allowlist.storages, order, offsets),
                tree=tree,
                metadata={"protocol_version": str(_PROTOCOL_VERSION), "byteorder": "little"},
                notes=notes,
                end=end,
            )


class _LegacyAllowlist(TorchAllowlist):
    """The permitted globals of the pickle of one legacy file, and the storages that it has used so far."""

    def __init__(self, limits: Limits, pickle_bytes: int, *, little_endian: bool = True) -> None:
        """Prepare for one pickle.

        Args:
            limits: Bounds on tensors, dimensions and names.
            pickle_bytes: Size of the pickle, in bytes.
            little_endian: Whether a little-endian machine wrote the file.
        """
        super().__init__(limits, pickle_bytes)
        self._little_endian = little_endian
        for name, dtype in _TENSOR_CLASSES.items():
            self.names["torch", name] = Constructor(
                qualified_name=f"torch.{name}", build=partial(self._early_tensor, dtype), creates=True
            )
        self.names["torch.nn.parameter", "Parameter"] = Constructor(
            qualified_name="torch.nn.parameter.Parameter", build=self._early_parameter, creates=True
        )

    def load_persistent(  # type: ignore[override]  # returns module classes too
        self, identity: object
    ) -> StorageReference | Opaque:
        """Return the storage, or the module class, that a persistent id declares.

        Raises:
            FormatError: The id is malformed or contradicts an earlier declaration of the same storage.
            UnsupportedError: It is a view of a storage, or torch does not read its dtype from legacy files.
        """
        if type(identity) is not tuple:
            return super().load_persistent(identity)
        if identity and type(identity[0]) is bytes:
            identity = tuple(map(from_bytes, identity))
        if len(identity) > 1 and identity[0] == "module" and isinstance(identity[1], Opaque):
            return identity[1]
        if len(identity) != _IDENTITY_FIELDS:
            raise FormatError("a persistent id has the wrong length", expected=_IDENTITY_FIELDS, found=len(identity))
        kind, view = identity[1], identity[5]
        storage = super().load_persistent(identity[:5])
        if type(kind) is StorageKind and kind.qualified_name == _UNTYPED:
            problem = "a tensor in an untyped storage, which torch itself does not read from legacy files"
            raise UnsupportedError(problem, found=_UNTYPED)
        if storage.nbytes and storage.dtype.startswith("complex") and not self._little_endian:
            problem = "a complex tensor from a big-endian machine, which torch misreads"
            raise UnsupportedError(problem, found=f"torch.{storage.dtype}")
        if view is not None:
            raise UnsupportedError("a tensor in a view of a storage, as torch wrote before 0.4", found=short_repr(view))
        return storage

    def _early_tensor(self, dtype: str, arguments: tuple[Any, ...]) -> PendingObject:
        if arguments:
            raise FormatError("the constructor of a tensor class has arguments")
        return PendingObject(finish=partial(self._finish_tensor, dtype))

    def _finish_tensor(self, dtype: str, state: object) -> Entry:
        storage, offset, size, stride = state if type(state) is tuple and len(state) == 4 else (None,) * 4
        if type(storage) is not StorageReference or storage.dtype != dtype:
            raise FormatError(f"the state of a {dtype} tensor is not a view of a {dtype} storage")
        return self._tensor(None, storage, offset, size, stride, requires_grad=False)

    def _early_parameter(self, arguments: tuple[Any, ...]) -> PendingObject:
        if len(arguments) > 1:
            problem = "the constructor of a parameter has the wrong number of arguments"
            raise FormatError(problem, expected="0 or 1", found=len(arguments))
        return PendingObject(finish=partial(self._finish_parameter, arguments))

    def _finish_parameter(self, given: tuple[Any, ...], state: object) -> Entry:
        length = 3 if given else 5
        if type(state) is not tuple or len(state) != length:
            raise FormatError("the state of a parameter has the wrong length", expected=length)
        if given:
            (data,), (requires_grad, _volatile, hooks) = given, state
        else:
            data, _gradient, hooks, requires_grad, _volatile = state
        return self._rebuild_parameter((data, requires_grad, OrderedDict() if hooks is None else hooks))


def _read_plain(source: Source, start: int, limits: Limits) -> tuple[object, int]:
    """Read the pickle of a plain value at byte ``start``; return the value and the offset after the pickle."""
    value, unpickler, end = unpickle_at(source, start, Allowlist(limits), limits)
    if unpickler.refusal is not None:
        raise unpickler.refusal.error
    for leaf in unpickler.opaque.values():
        problem = f"the file names {leaf.qualified_name} outside its object"
        raise UnsafeContentError(problem, file=source.path)
    return value, end


def _check_preamble(source: Source, limits: Limits) -> tuple[int, bool]:
    """Check the three pickles before the object; return its offset and whether a little-endian machine wrote it."""
    magic, start = _read_plain(source, 0, limits)
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise FormatError("the magic number is wrong", file=source.path, offset=0, expected=f"{LEGACY_MAGIC:#x}")
    version, end = _read_plain(source, start, limits)
    if type(version) is not int or version != _PROTOCOL_VERSION:
        raise FormatError("unknown protocol version", file=source.path, offset=start, expected=_PROTOCOL_VERSION)
    start = end
    system, end = _read_plain(source, start, limits)
    if type(system) is not dict:
        raise FormatError("the system information is not a dict", file=source.path, offset=start)
    # torch reads the data as little-endian in any case; see ``_LegacyAllowlist`` for complex numbers.
    return end, system.get("little_endian") is not False


def _read_order(
    source: Source, start: int, storages: Sequence[StorageReference], limits: Limits
) -> tuple[list[StorageReference], int]:
    """Return the storages in data order, and the offset of the data."""
    check_limit(limits, "entries", len(storages), "the number of storages", file=source.path)
    keys, end = _read_plain(source, start, limits)
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise FormatError("the list of storage keys is not a list of strings", file=source.path, offset=start)
    unlisted = {storage.key: storage for storage in storages}
    order = []
    for key in keys:
        storage = unlisted.pop(key, None)
        if storage is None:
            problem = f"storage key {key!r} is listed twice, or not used by the object"
            raise FormatError(problem, file=source.path, offset=start)
        order.append(storage)
    for key in unlisted:
        raise FormatError(f"the list of storage keys does not contain {key!r}", file=source.path, offset=start)
    return order, end


def _check_counts(source: Source, order: Sequence[StorageReference], data_start: int) -> tuple[list[int], int]:
    """Check the element count before each storage; return the offset of each storage's data, and the end of the last.

    The counts are checked before the size of the file: a wrong count identifies the damaged storage.
    """
    file_bytes = source.identity.nbytes
    *starts, end = accumulate((_COUNT.size + storage.nbytes for storage in order), initial=data_start)
    inside = bisect_right(starts, file_bytes - _COUNT.size)
    if checks_with_data(source) and end <= file_bytes:
        for storage, start in zip(order, starts, strict=True):
            check = partial(_check_count, source.path, storage, start)
            source.expect(start, _COUNT.size, storage.nbytes, check)
        return list(map(add, starts, repeat(_COUNT.size))), end
    counts = read_ranges(source, starts[:inside], [_COUNT.size] * inside, gap_bytes=_COUNT_GAP_BYTES)
    for storage, start, raw in zip(order, starts, counts, strict=False):  # only counts inside the file were read
        _check_count(source.path, storage, start, raw)
    if end > file_bytes:
        raise TruncatedError(
            "the file ends before the end of its last storage",
            file=source.path,
            offset=file_bytes,
            expected=f"{end} bytes",
            found=f"{file_bytes} bytes",
        )
    return list(map(add, starts, repeat(_COUNT.size))), end


def _check_count(file: str, storage: StorageReference, start: int, raw: bytes) -> None:
    (count,) = _COUNT.unpack(raw)
    if count != storage.numel:
        problem = f"the size of storage {storage.key!r} does not match its declaration in the object"
        expected = f"{storage.numel} elements of {storage.dtype}"
        raise FormatError(problem, file=file, offset=start, expected=expected, found=count)


def _storages(
    storages: Sequence[StorageReference], order: Sequence[StorageReference], offsets: Sequence[int]
) -> tuple[Storage, ...]:
    """Return the storages in the order of their positions, by which entries refer to them."""
    by_position = [0] * len(storages)
    for reference, offset in zip(order, offsets, strict=True):
        by_position[reference.position] = offset
    return tuple(
        Storage(0, offset, reference.nbytes, reference.key)
        for offset, reference in zip(by_position, storages, strict=True)
    )
