"""What a safetensors file is: an 8-byte length, a JSON header, and the tensors without gaps, the widest dtypes first.

The order is that of the safetensors library (by alignment, then by name), so that every tensor is aligned to its
elements. A tensor that is there under several names is stored once; the other names stand in ``__metadata__`` with the
name that is stored, as ``safetensors.torch.save_model`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.formats.safetensors.header import DTYPES

__all__ = ["SafetensorsLayout", "TensorOutline", "lay_out_safetensors"]

#: Names of the specification for the dtypes of torch: those that are read, the other way round.
_NAMES = {name: spelled.decode() for spelled, name in DTYPES.items()}

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: The header is padded with spaces to a multiple of this.
_ALIGNMENT_BYTES = 8

#: Longest header that safetensors reads.
_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """What a file says of one tensor."""

    #: Name of its dtype in the file.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the file."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsLayout:
    """Where everything lies in the file."""

    #: The length and the JSON.
    header: bytes
    #: Name, dtype in the file, and first byte in the file of each tensor, in order.
    tensors: tuple[tuple[str, str, int], ...]
    #: Bytes of the whole file.
    nbytes: int


def lay_out_safetensors(tensors: Mapping[str, TensorOutline], metadata: Mapping[str, str]) -> SafetensorsLayout:
    """Decide the whole file.

    Raises:
        SaveError: A name or a dtype that the format cannot hold.
    """
    # Text at once: a dict for each of 100,000 tensors would take five times as much memory.
    parts = [f'"__metadata__":{_JSON.encode(dict(metadata))}'] if metadata else []
    at = 0
    starts = []
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name)):
        tensor = tensors[name]
        if name == "__metadata__":
            raise SaveError("safetensors has no place for a tensor of this name", tensor=name)
        if tensor.dtype not in _NAMES:
            raise SaveError("safetensors has no such dtype", tensor=name, found=tensor.dtype)
        end = at + tensor.nbytes
        shape = ",".join(map(str, _counted(name, tensor)))
        parts.append(
            f'{_JSON.encode(name)}:{{"dtype":"{_NAMES[tensor.dtype]}","shape":[{shape}],"data_offsets":[{at},{end}]}}'
        )
        starts.append((name, tensor.dtype, at))
        at = end
    text = _encode(parts)
    if len(text) > _HEADER_BYTES:
        raise SaveError("the header is longer than safetensors reads", expected=_HEADER_BYTES, found=len(text))
    front = len(text).to_bytes(8, "little") + text
    return SafetensorsLayout(
        header=front,
        tensors=tuple((name, kind, start + len(front)) for name, kind, start in starts),
        nbytes=len(front) + at,
    )


def _counted(name: str, tensor: TensorOutline) -> tuple[int, ...]:
    """Return the shape as the header counts it: values, of which torch packs two in an element of this dtype."""
    if tensor.dtype != "float4_e2m1fn_x2":
        return tensor.shape
    if not tensor.shape:
        raise SaveError("safetensors has no place for two values without a dimension", tensor=name, found=tensor.dtype)
    return (*tensor.shape[:-1], 2 * tensor.shape[-1])


def _encode(parts: Sequence[str]) -> bytes:
    try:
        text = f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as error:
        raise SaveError("a name holds a lone surrogate, which UTF-8 has not", found=repr(error.object[:80])) from error
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)
