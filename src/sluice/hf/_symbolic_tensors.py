"""Tensors without data that represent entries, so that other libraries' conversions can run on them.

A conversion that only moves elements (``cat``, ``stack``, ``chunk``, ``transpose``, ``reshape``, ...) maps symbolic
tensors to symbolic tensors, whose entries the planner can read. An operation that computes raises ``CannotFollow``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from sluice._dtypes import torch_dtype
from sluice._geometry import contiguous_stride
from sluice.entries.assembly import join, permute, reshape, stack
from sluice.entries.slicing import slice_entry
from sluice.records import Entry

__all__ = ["CannotFollow", "SymbolicTensor"]


class CannotFollow(Exception):  # noqa: N818  not an error of the file: the caller maps it to one
    """An operation computes elements, or is not supported."""


class SymbolicTensor(torch.Tensor):
    """Represents the tensor of an entry."""

    entry: Entry

    @staticmethod
    def __new__(cls: type[Self], entry: Entry) -> Self:
        """Return a tensor with the entry's shape and dtype. It looks contiguous, so that no code requests a copy."""
        tensor: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  torch's documented way
            cls,
            entry.shape,
            strides=contiguous_stride(entry.shape),
            dtype=torch_dtype(entry.dtype),
            device=torch.device("cpu"),
        )
        tensor.entry = entry
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument that only torch passes
        return f"SymbolicTensor({self.entry.dtype}, {list(self.entry.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the version that is switched off
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply one operation of torch to entries.

        Raises:
            CannotFollow: The operation does not only move elements.
        """
        name = func.overloadpacket.__name__
        follow = _OPERATIONS.get(name)
        dtype = (kwargs or {}).get("dtype")
        if follow is None or not (dtype is None or dtype is args[0].dtype):
            raise CannotFollow(f"torch.{name} computes elements, or is not supported")
        result = follow(*args)
        return [cls(entry) for entry in result] if isinstance(result, list) else cls(result)


def _same(tensor: SymbolicTensor, *_: object) -> Entry:
    return tensor.entry


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> Entry:
    return join([tensor.entry for tensor in tensors], dim % tensors[0].dim())


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> Entry:
    return stack([tensor.entry for tensor in tensors], dim % (tensors[0].dim() + 1))


def _unsqueeze(tensor: SymbolicTensor, dim: int) -> Entry:
    return slice_entry(tensor.entry, (*[slice(None)] * (dim % (tensor.dim() + 1)), None))


def _slice(tensor: SymbolicTensor, dim: int = 0, *bounds: int | None) -> Entry:
    return slice_entry(tensor.entry, (*[slice(None)] * (dim % tensor.dim()), slice(*(bounds or (None,)))))


def _select(tensor: SymbolicTensor, dim: int, index: int) -> Entry:
    return slice_entry(tensor.entry, (*[slice(None)] * (dim % tensor.dim()), index))


def _unbind(tensor: SymbolicTensor, dim: int = 0) -> list[Entry]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split(tensor: SymbolicTensor, size: int | Sequence[int], dim: int = 0) -> list[Entry]:
    whole = tensor.shape[dim]
    if isinstance(size, int):
        size = [min(size, whole - start) for start in range(0, whole, size)]
    ends = [sum(size[: i + 1]) for i in range(len(size))]
    return [_slice(tensor, dim, end - length, end) for end, length in zip(ends, size, strict=True)]


def _transpose(tensor: SymbolicTensor, first: int, second: int) -> Entry:
    dims = list(range(tensor.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return permute(tensor.entry, dims)


def _permute(tensor: SymbolicTensor, dims: Sequence[int]) -> Entry:
    return permute(tensor.entry, [dim % tensor.dim() for dim in dims])


def _view(tensor: SymbolicTensor, shape: Sequence[int]) -> Entry:
    return reshape(tensor.entry, shape)


def _squeeze(tensor: SymbolicTensor, dims: int | Sequence[int] | None = None) -> Entry:
    chosen = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    squeezed = {dim % tensor.dim() for dim in chosen if tensor.shape[dim] == 1}
    return slice_entry(tensor.entry, tuple(0 if dim in squeezed else slice(None) for dim in range(tensor.dim())))


_OPERATIONS: Mapping[str, Callable[..., Entry | list[Entry]]] = {
    "_to_copy": _same,
    "_unsafe_view": _view,
    "alias": _same,
    "cat": _cat,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    "permute": _permute,
    "reshape": _view,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": lambda tensor: _transpose(tensor, 0, 1),
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": _view,
}
