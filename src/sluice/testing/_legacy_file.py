"""A builder of unusual and hostile legacy ``torch.save`` files; it writes its arguments unchecked.

Example:
    >>> weight = tensor_call(legacy_storage("7", 4), shape=(2, 2))
    >>> data = legacy_file({"w": weight}, {"7": (4, bytes(16))})
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from sluice.testing._archives import Global, Persistent, pickled

__all__ = ["legacy_file", "legacy_storage"]

#: System information that torch writes.
_SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def legacy_storage(
    key: object, numel: object, *, kind: str = "FloatStorage", view: object = None, location: object = "cpu"
) -> Persistent:
    """Return the persistent id of a storage; ``view`` is None, or its key, first element and number of elements."""
    return Persistent(("storage", Global("torch", kind), key, location, numel, view))


def legacy_file(
    value: object,
    storages: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    magic: object = 0x1950A86A20F9469CFC6C,
    version: object = 1001,
    system: object = _SYSTEM,
    keys: object = None,
    trailing: bytes = b"",
) -> bytes:
    """Return a legacy file of ``value``.

    Args:
        value: A value for ``encode``, or a complete pickle as bytes.
        storages: Number of elements, written before the data, and the data, by key.
        magic: The magic number.
        version: The version of the protocol.
        system: The system information.
        keys: The list of keys; None for those of ``storages``.
        trailing: Bytes after the last storage.
    """
    storages = storages or {}
    pickles = [
        pickled(magic),
        pickled(version),
        pickled(system),
        value if isinstance(value, bytes) else pickled(value),
        pickled(list(storages) if keys is None else keys),
    ]
    data = [struct.pack("<q", count) + raw for count, raw in storages.values()]
    return b"".join([*pickles, *data, trailing])
