"""Split sparse and quantized tensors into their dense components, which share memory with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sluice.writing.torch_tensors import Geometry, Rebuild, dense, quantized, sparse

__all__ = ["QUANTIZED_DTYPES", "SPARSE_LAYOUTS", "count_parts", "dense_parts", "describe"]

#: Names of the methods that return the compressed and the plain indices of each layout.
_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}

#: Layouts that torch pickles.
SPARSE_LAYOUTS = frozenset({torch.sparse_coo, *_INDICES})

#: Integer dtype of each quantized dtype that torch pickles.
QUANTIZED_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

# torch has no public accessors for the components of an uncoalesced tensor; coalesce() would change them.
# ruff: noqa: SLF001


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense components of a tensor: the tensor itself if it is dense."""
    tensor = tensor.detach() if tensor.layout is not torch.strided or tensor.is_quantized else tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _INDICES:
        compressed, plain = _INDICES[tensor.layout]
        return getattr(tensor, compressed)(), getattr(tensor, plain)(), tensor.values()
    if not tensor.is_quantized:
        return (tensor,)
    integers = torch.empty(0, dtype=QUANTIZED_DTYPES[tensor.dtype], device=tensor.device)
    integers.set_(tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride())
    if tensor.qscheme() is torch.per_tensor_affine:
        return (integers,)
    return integers, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()


def count_parts(tensor: torch.Tensor) -> int:
    """Return the number of ``dense_parts`` of a tensor."""
    if tensor.layout is torch.strided:
        return 3 if tensor.is_quantized and tensor.qscheme() is not torch.per_tensor_affine else 1
    return 2 if tensor.layout is torch.sparse_coo else 3


def describe(tensor: torch.Tensor, parts: Sequence[Geometry]) -> Rebuild:
    """Return what rebuilds a tensor in a pickle.

    Args:
        tensor: The tensor.
        parts: Descriptions of its ``dense_parts``.
    """
    if tensor.layout is not torch.strided:
        coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
        return sparse(str(tensor.layout).removeprefix("torch."), parts, tuple(tensor.shape), coalesced=coalesced)
    if not tensor.is_quantized:
        return partial(dense, parts[0])
    dtype = str(tensor.dtype).removeprefix("torch.")
    if len(parts) == 1:
        return quantized(dtype, parts[0], (tensor.q_scale(),), (tensor.q_zero_point(),), None)
    integers, scales, zero_points = parts
    return quantized(dtype, integers, scales, zero_points, tensor.q_per_channel_axis())
