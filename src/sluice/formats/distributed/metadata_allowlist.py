"""What the pickle of ``.metadata`` may name: torch's classes for it, as records that hold what they are given.

- ``Metadata``, ``TensorStorageMetadata``, ``ChunkStorageMetadata``, ``MetadataIndex``, ``TensorProperties`` and
  ``_StorageInfo``: a ``MetadataRecord`` with the class's name and the state, nothing of which is checked here
- ``BytesStorageMetadata``: ``BYTES``
- memory formats: ``MEMORY_FORMAT``, whichever it is; ``StorageMeta`` and paths: inert leaves. Nothing of them is used
- torch's plain values (``_torch_values``)

``MetadataIndex`` stands as a key. Records are told apart by identity, so that no file can make keys collide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Never

from sluice._errors import FormatError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Constructor, KeyGuard, PendingObject
from sluice.formats.torch_save.plain_values import PlainValues
from sluice.records import Opaque

__all__ = ["BYTES", "MEMORY_FORMAT", "MetadataAllowlist", "MetadataRecord"]

_METADATA = "torch.distributed.checkpoint.metadata"

#: Where tensors' properties lived until torch 2.2.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

#: Classes whose objects are kept with their fields.
_RECORDS = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorProperties"),
    (_SHARDED, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)

#: Enumerations of memory formats, and their values.
_MEMORY_FORMATS = ((_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING"))
_MEMORY_FORMAT_VALUES = (0, 1, 2)

#: Classes whose objects are leaves that say where the checkpoint was written to.
_LEAVES = (
    (_METADATA, "StorageMeta"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *((module, f"Pure{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
)

#: Describes a value that is no tensor.
BYTES = Opaque(qualified_name=f"{_METADATA}.BytesStorageMetadata")

#: How the elements of a tensor were to be laid out. It says nothing of its chunks.
MEMORY_FORMAT = Opaque(qualified_name="torch.memory_format")


@dataclass(frozen=True, slots=True, eq=False)
class MetadataRecord:
    """An object of one of the classes in ``_RECORDS``."""

    #: Name of the class.
    kind: str
    #: What the pickle gives it: fields by name, or a tuple.
    state: Any


class _Keys(KeyGuard):
    def check(self, key: object) -> None:
        if type(key) is not MetadataRecord:
            super().check(key)


class MetadataAllowlist:
    """What the pickle may name; see ``Allowlist``."""

    def __init__(self, limits: Limits, pickle_bytes: int) -> None:
        self.keys: KeyGuard = _Keys(limits)
        self.names = PlainValues(self.keys, pickle_bytes).names()
        for module, name in _RECORDS:
            self.names[module, name] = Constructor(
                qualified_name=f"{module}.{name}", build=partial(_begin, name), creates=True
            )
        for module, name in _MEMORY_FORMATS:
            self.names[module, name] = Constructor(qualified_name=f"{module}.{name}", build=_memory_format)
        leaves = [Opaque(qualified_name=f"{module}.{name}") for module, name in _LEAVES]
        for leaf in (BYTES, *leaves):
            module, _, name = leaf.qualified_name.rpartition(".")
            self.names[module, name] = Constructor(
                qualified_name=leaf.qualified_name, build=partial(_leaf, leaf), creates=True
            )

    def load_persistent(self, identity: object) -> Never:  # noqa: ARG002 - whatever it is
        raise FormatError("a storage in the metadata")


def _begin(kind: str, arguments: tuple[Any, ...]) -> PendingObject:
    if arguments:
        raise FormatError(f"a {kind} that its class would make from arguments")
    return PendingObject(finish=partial(MetadataRecord, kind))


def _memory_format(arguments: tuple[Any, ...]) -> Opaque:
    if len(arguments) != 1 or type(arguments[0]) is not int or arguments[0] not in _MEMORY_FORMAT_VALUES:
        raise FormatError("a memory format that torch does not have")
    return MEMORY_FORMAT


def _leaf(leaf: Opaque, arguments: tuple[Any, ...]) -> Opaque:  # noqa: ARG001 - only the name matters
    return leaf
