"""Permitted globals of the pickle in a ``.metadata`` file, and the objects that replace them.

- ``Metadata``, ``TensorStorageMetadata``, ``ChunkStorageMetadata``, ``MetadataIndex``, ``TensorProperties`` and
  ``_StorageInfo``: a ``MetadataRecord`` with the name of the class and its unchecked state
- ``BytesStorageMetadata``: ``BYTES``
- memory formats, ``StorageMeta`` and paths: inert leaves. Their values are not used
- torch's plain values: see ``torch_save.plain_values``

``MetadataIndex`` objects are dict keys. Records compare by identity, so a file cannot make them collide.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Struct

from sluice._errors import FormatError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Allowlist, Constructor, KeyGuard, PendingObject
from sluice.formats.torch_save.plain_values import PlainValues, plain_global
from sluice.records import Opaque

__all__ = ["BYTES", "MetadataAllowlist", "MetadataRecord"]

_METADATA = "torch.distributed.checkpoint.metadata"

#: Module of ``TensorProperties`` until torch 2.2.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

#: Classes whose objects become records.
_RECORDS = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorProperties"),
    (_SHARDED, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)

#: Classes whose objects become inert leaves: they describe tensors before the save, and where it was written.
_LEAVES = (
    *((_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING")),
    (_METADATA, "StorageMeta"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *((module, f"Pure{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
)

#: Description of an item that is not a tensor.
BYTES = Opaque(qualified_name=f"{_METADATA}.BytesStorageMetadata")


class MetadataRecord(Struct, frozen=True, eq=False):
    """An object of one of the classes in ``_RECORDS``."""

    #: Name of the class.
    kind: str
    #: State from the pickle, unchecked: fields by name, or a tuple.
    state: Any


class _MetadataKeyGuard(KeyGuard):
    def check(self, key: object) -> None:
        if type(key) is not MetadataRecord:
            super().check(key)


class MetadataAllowlist(Allowlist):
    """The permitted globals of one pickle."""

    def __init__(self, limits: Limits, pickle_bytes: int) -> None:
        super().__init__(limits)
        self.keys = _MetadataKeyGuard(limits)
        #: The globals of metadata.
        self.names = PlainValues(self.keys, pickle_bytes).names()
        for module, name in _RECORDS:
            self.names[module, name] = Constructor(
                qualified_name=f"{module}.{name}", build=partial(_begin, name), creates=True
            )
        leaves = [Opaque(qualified_name=f"{module}.{name}") for module, name in _LEAVES]
        for leaf in (BYTES, *leaves):
            module, _, name = leaf.qualified_name.rpartition(".")
            self.names[module, name] = Constructor(
                qualified_name=leaf.qualified_name, build=partial(lambda leaf, _: leaf, leaf), creates=True
            )

    def find(self, module: str, name: str) -> object | None:
        return self.names.get((module, name)) or plain_global(module, name)


def _begin(kind: str, arguments: tuple[Any, ...]) -> PendingObject:
    if arguments:
        raise FormatError(f"the constructor of {kind} has arguments")
    return PendingObject(finish=partial(MetadataRecord, kind))
