r"""Shards of torch's ``HuggingFaceStorageWriter``: whole tensors are read, chunks of tensors are refused by name.

Layout: each rank writes ``shard-R-model-I-of-N.safetensors`` with its chunks of tensors, under the names of the whole
tensors. ``__metadata__`` has the place of each chunk::

    {"DCP_SHARDING_INFO": "{\"a.weight\": {\"saved_offsets\": [4, 0]}, ...}", "DCP_VERSION": "1.0", "format": "pt"}

The shape of a tensor is stored nowhere. A file is read if all its chunks start at the first element: one process writes
whole tensors in this way. Of several ranks, the files of the others show what it is.

Limits: ``Limits.entries`` for the tensors of the description, and ``Limits.dimensions``.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import LimitError, UnsupportedError
from sluice._options import Limits
from sluice.checkpoint.layout import PLACES
from sluice.formats.strict_json import count_strings, decode_json, has_longer_list, without_strings
from sluice.records import Index

__all__ = ["without_places"]

_VERSION = "DCP_VERSION"

_CONSOLIDATE = (
    "Consolidate it with HuggingFaceStorageWriter(enable_consolidation=True), or load it with torch's "
    f"HuggingFaceStorageReader. If the file holds whole tensors, its metadata was copied: remove {PLACES!r}."
)


class _Place(Struct):
    """The place of a chunk in its tensor."""

    saved_offsets: tuple[int, ...]


def without_places(index: Index, limits: Limits) -> Index:
    """Return the index of a file without the description of its chunks.

    Raises:
        UnsupportedError: A chunk does not start at the first element of its tensor.
        FormatError: The description is malformed.
        LimitError: It has more values than the limits allow.
    """
    path, data = index.files[0].path, index.metadata.get(PLACES, "{}").encode()
    if count_strings(data) > 2 * limits.entries or has_longer_list(without_strings(data), limits.dimensions):
        expected = f"at most {limits.entries}"
        raise LimitError("the description of chunks exceeds the limit 'entries'", file=path, expected=expected)
    for name, place in decode_json(data, dict[str, _Place], "the description of chunks", path).items():
        if any(place.saved_offsets):
            problem = "the file holds a chunk of a tensor, which torch.distributed.checkpoint divided over ranks"
            raise UnsupportedError(
                problem, file=path, tensor=name, found=f"elements from {place.saved_offsets}", advice=_CONSOLIDATE
            )
    metadata = {key: text for key, text in index.metadata.items() if key not in {PLACES, _VERSION}}
    return replace(index, metadata=metadata)
