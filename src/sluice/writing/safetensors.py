"""Layout of a safetensors file: an 8-byte length, a JSON header, and the tensors without gaps, widest dtypes first.

The order is that of the safetensors library (by alignment, then by name), so that every tensor is aligned to its
elements. A tensor with several names is stored once; ``formats.safetensors.header`` says how ``__metadata__`` holds the
other names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.formats.safetensors.header import DTYPES

__all__ = ["SafetensorsLayout", "TensorOutline", "in_utf8", "lay_out_safetensors"]

#: safetensors dtype by torch dtype name: the inverse of the reader's table.
_NAMES = {name: spelled for spelled, name in DTYPES.items()}

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: The header is padded with spaces to a multiple of this.
_ALIGNMENT_BYTES = 8

#: Longest header that safetensors reads, in bytes.
_HEADER_BYTES = 100_000_000


class TensorOutline(Struct, frozen=True):
    """Dtype and shape of one tensor in a file."""

    #: Name of the dtype in the file.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its elements in the file, in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsLayout(Struct, frozen=True, kw_only=True):
    """Header of the file and position of each tensor."""

    #: The length and the JSON header.
    header: bytes
    #: Name, dtype and first byte in the file of each tensor, in file order.
    tensors: tuple[tuple[str, str, int], ...]
    #: Size of the file, in bytes.
    nbytes: int


def lay_out_safetensors(tensors: Mapping[str, TensorOutline], metadata: Mapping[str, str]) -> SafetensorsLayout:
    """Return the layout of the whole file.

    Raises:
        SaveError: The format cannot store a name or a dtype, or the header is too long.
    """
    # Text directly: a dict for each of 100,000 tensors would take five times as much memory.
    parts = [f'"__metadata__":{_JSON.encode(dict(metadata))}'] if metadata else []
    at = 0
    starts = []
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name)):
        tensor = tensors[name]
        if name == "__metadata__":
            raise SaveError("safetensors reserves this name", tensor=name)
        if tensor.dtype not in _NAMES:
            raise SaveError("safetensors does not support this dtype", tensor=name, found=tensor.dtype)
        end = at + tensor.nbytes
        shape = ",".join(map(str, _header_shape(name, tensor)))
        parts.append(
            f'{_JSON.encode(name)}:{{"dtype":"{_NAMES[tensor.dtype]}","shape":[{shape}],"data_offsets":[{at},{end}]}}'
        )
        starts.append((name, tensor.dtype, at))
        at = end
    text = in_utf8(f"{{{','.join(parts)}}}")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _HEADER_BYTES:
        raise SaveError("the header is too long for safetensors", expected=_HEADER_BYTES, found=len(text))
    front = len(text).to_bytes(8, "little") + text
    return SafetensorsLayout(
        header=front,
        tensors=tuple((name, kind, start + len(front)) for name, kind, start in starts),
        nbytes=len(front) + at,
    )


def _header_shape(name: str, tensor: TensorOutline) -> tuple[int, ...]:
    """Return the shape in values, as the header counts it: torch packs two float4 values into one element."""
    if tensor.dtype != "float4_e2m1fn_x2":
        return tensor.shape
    if not tensor.shape:
        raise SaveError("safetensors cannot store packed values of a 0-d tensor", tensor=name, found=tensor.dtype)
    return (*tensor.shape[:-1], 2 * tensor.shape[-1])


def in_utf8(names: str) -> bytes:
    """Return text with names in UTF-8; raise ``SaveError`` for a lone surrogate."""
    try:
        return names.encode()
    except UnicodeEncodeError as error:
        raise SaveError(
            "a name contains a lone surrogate, which UTF-8 cannot encode", found=repr(error.object[:80])
        ) from error
