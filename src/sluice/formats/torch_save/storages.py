"""Storages that the pickle of a ``torch.save`` file declares by persistent ids.

A persistent id is ``("storage", class, key, location, elements)``. Each declares a storage, or names one that has been
declared. The location, its device when it was saved, is any text, and not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sluice._dtypes import ITEM_BYTES
from sluice._errors import FormatError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Allowlist
from sluice.formats.torch_save.composites import PACKED_DTYPES, QUANTIZED_DTYPES
from sluice.formats.torch_save.plain_values import from_bytes
from sluice.records import Opaque

__all__ = ["STORAGE_DTYPES", "DeclaredStorages", "StorageKind", "StorageReference", "storage_kinds"]

#: ``("storage", class, key, location, elements)``
_IDENTITY_FIELDS = 5

#: Dtype of each storage class of torch, by its name.
STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKind(Opaque):
    """A storage class; an opaque leaf if the tree contains it as a value."""

    #: Dtype of the elements.
    dtype: str


class StorageReference(NamedTuple):
    """A storage, as declared by a persistent id."""

    #: Position in ``DeclaredStorages.storages``.
    position: int
    #: Key of the storage; in a zip file, the name of its record under ``data/``.
    key: str
    #: Dtype of the elements: ``uint8`` for untyped storages, for example ``qint8`` for quantized storages.
    dtype: str
    #: Number of elements.
    numel: int
    #: Size of the data, in bytes.
    nbytes: int

    @property
    def element_dtype(self) -> str:
        """Dtype of the elements as plain numbers: ``int8`` for ``qint8``, ``uint8`` for packed dtypes."""
        return QUANTIZED_DTYPES.get(self.dtype) or PACKED_DTYPES.get(self.dtype) or self.dtype


class DeclaredStorages(Allowlist):
    """The storages that one pickle has used so far."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: Storages in the order of first use.
        self.storages: list[StorageReference] = []
        #: Names of the storage classes that sluice does not know.
        self.unknown_storages: set[str] = set()
        self._by_key: dict[str, StorageReference] = {}

    def load_persistent(self, identity: object) -> StorageReference:
        """Return the storage that a persistent id declares.

        Raises:
            FormatError: The id is malformed or contradicts an earlier declaration of the same storage.
            UnsupportedError: The class of the storage is unknown.
        """
        if type(identity) is tuple and identity and type(identity[0]) is bytes:
            identity = tuple(map(from_bytes, identity))
        if type(identity) is not tuple or len(identity) != _IDENTITY_FIELDS or identity[0] != "storage":
            raise FormatError("a persistent id does not identify a storage")
        _, kind, key, location, numel = identity
        if type(kind) is Opaque and kind.qualified_name.startswith("torch."):
            self.unknown_storages.add(kind.qualified_name)
            raise UnsupportedError("a storage of a class that sluice does not know", found=kind.qualified_name)
        if type(kind) is not StorageKind or type(key) is not str or type(numel) is not int or numel < 0:
            raise FormatError("a storage is malformed", expected="class, key and number of elements")
        if type(location) is not str:
            raise FormatError("the device of a storage is not text")
        return self._declare(kind, key, numel)

    def _declare(self, kind: StorageKind, key: str, numel: int) -> StorageReference:
        known = self._by_key.get(key)
        if known is None:
            known = StorageReference(len(self.storages), key, kind.dtype, numel, 0)
            known = known._replace(nbytes=numel * ITEM_BYTES[known.element_dtype])
            self._by_key[key] = known
            self.storages.append(known)
        elif known.dtype != kind.dtype or known.numel != numel:
            if known.numel or numel:
                problem = f"storage {key!r} is declared twice with different dtypes or sizes"
                expected, found = f"{known.numel} of {known.dtype}", f"{numel} of {kind.dtype}"
                raise FormatError(problem, expected=expected, found=found)
            # torch.save can declare one empty storage with the dtypes of all its views.
            known = known._replace(dtype=kind.dtype)
        return known


def storage_kinds() -> dict[tuple[str, str], object]:
    """Return the replacement of each storage class, by module and name."""
    kinds: dict[tuple[str, str], object] = {
        ("torch", name): StorageKind(qualified_name=f"torch.{name}", dtype=dtype)
        for name, dtype in STORAGE_DTYPES.items()
    }
    untyped = StorageKind(qualified_name="torch.storage.UntypedStorage", dtype="uint8")
    return {**kinds, ("torch.storage", "UntypedStorage"): untyped}
