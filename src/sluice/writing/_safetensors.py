"""Writes a safetensors file: an 8-byte length, a JSON header, and the tensors without gaps, the widest dtypes first.

The order is that of the safetensors library (by alignment, then by name), so that every tensor is aligned to its
elements. A tensor that is there under several names is stored once; the other names stand in ``__metadata__`` with the
name that is stored, as ``safetensors.torch.save_model`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.formats._safetensors_header import DTYPES
from sluice.writing._chunks import Staging, chunks
from sluice.writing._items import finished_dtype
from sluice.writing._manifest import ManifestWriter
from sluice.writing._replacement import Replacement

__all__ = ["SafetensorsLayout", "lay_out_safetensors", "stored_once", "write_safetensors"]

#: Names of the specification for the dtypes of torch: those that are read, the other way round.
_NAMES = {name: spelled.decode() for spelled, name in DTYPES.items()}

#: The header is padded with spaces to a multiple of this.
_ALIGNMENT_BYTES = 8

#: Longest header that safetensors reads.
_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsLayout:
    """Where everything lies in the file."""

    #: The length and the JSON.
    header: bytes
    #: Name, dtype in the file, and first byte in the file of each tensor, in order.
    tensors: tuple[tuple[str, str, int], ...]
    #: Bytes of the whole file.
    nbytes: int


def stored_once(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without further names of the same tensor, and those names with the one that stays.

    The name that stays is the first in alphabetical order, as with safetensors' own ``save_model``.
    """
    firsts: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.numel() == 0:
            continue
        same = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = firsts.setdefault(same, name)
        if kept != name:
            aliases[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def lay_out_safetensors(
    tensors: Mapping[str, torch.Tensor], dtype: str | None, metadata: Mapping[str, str]
) -> SafetensorsLayout:
    """Decide the whole file.

    Raises:
        SaveError: A name or a dtype that the format cannot hold.
    """
    finished = {name: finished_dtype(tensor, dtype) for name, tensor in tensors.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    starts = []
    for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[finished[name]], name)):
        if name == "__metadata__":
            raise SaveError("safetensors has no place for a tensor of this name", tensor=name)
        if finished[name] not in _NAMES:
            raise SaveError("safetensors has no such dtype", tensor=name, found=finished[name])
        end = at + tensors[name].numel() * ITEM_BYTES[finished[name]]
        header[name] = {
            "dtype": _NAMES[finished[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, end],
        }
        starts.append((name, finished[name], at))
        at = end
    text = _encode(header)
    if len(text) > _HEADER_BYTES:
        raise SaveError("the header is longer than safetensors reads", expected=_HEADER_BYTES, found=len(text))
    front = len(text).to_bytes(8, "little") + text
    return SafetensorsLayout(
        header=front,
        tensors=tuple((name, kind, start + len(front)) for name, kind, start in starts),
        nbytes=len(front) + at,
    )


def _encode(header: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise SaveError("a name holds a lone surrogate, which UTF-8 has not", found=repr(error.object[:80])) from error
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)


def write_safetensors(
    layout: SafetensorsLayout,
    tensors: Mapping[str, torch.Tensor],
    file: Replacement,
    staging: Staging,
    wrote: Callable[[int], None],
    manifest: ManifestWriter | None = None,
) -> None:
    """Write what was decided; the caller commits.

    Args:
        layout: From ``lay_out_safetensors``.
        tensors: The same tensors.
        file: Where to.
        staging: For what is cast, strided or on an accelerator.
        wrote: Called with the bytes of each piece.
        manifest: Gets a hash of each tensor.
    """
    file.reserve(layout.nbytes)
    file.write_at(0, layout.header)
    for name, dtype, start in layout.tensors:
        at = start
        pieces = chunks(tensors[name], dtype, staging)
        if manifest:
            shape = tensors[name].shape
            manifest.expect(name, dtype=dtype, shape=shape, nbytes=shape.numel() * ITEM_BYTES[dtype])
            pieces = manifest.through(name, pieces)
        for piece in pieces:
            file.write_at(at, piece)
            at += len(piece)
            wrote(len(piece))
