"""Tensors without data that represent entries, so that foreign code which renames and rearranges weights can run.

An operation that only moves elements (``cat``, ``stack``, ``chunk``, ``transpose``, ``reshape``, ...) maps symbolic
tensors to symbolic tensors, whose entries the planner can read. Real tensors in a ``cat`` or ``stack`` become constant
boxes. An operation that computes, or that reads a value, raises ``CannotFollow``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch

from sluice import _defaults as defaults
from sluice._dtypes import dtype_name, is_castable, torch_dtype
from sluice.entries.assembly import join, permute, reshape, stack
from sluice.entries.slicing import slice_entry
from sluice.records import NO_STORAGE, Entry, elements_of
from sluice.records.geometry import contiguous_stride

__all__ = ["CannotFollow", "SymbolicTensor", "entry_of_values"]


class CannotFollow(Exception):  # noqa: N818  not an error of the file: the caller maps it to one
    """An operation computes elements, or is not supported."""


def _refusing(problem: str) -> Any:
    """Return a method that cannot be followed."""

    def method(*_: object, **__: object) -> NoReturn:
        raise CannotFollow(problem)

    return method


class SymbolicTensor(torch.Tensor):
    """Represents the tensor of an entry."""

    entry: Entry

    @staticmethod
    def __new__(cls: type[Self], entry: Entry) -> Self:
        """Return a tensor with the entry's shape and dtype. It looks contiguous, so that no code requests a copy."""
        dtype = entry.dtype if entry.composite is None else entry.composite.values.dtype
        tensor: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  torch's documented way
            cls,
            entry.shape,
            strides=contiguous_stride(entry.shape),
            dtype=torch_dtype(dtype),
            device=torch.device("cpu"),
        )
        tensor.entry = entry
        return tensor

    #: Results of operations are made below; torch would also turn real tensors among them into this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001  torch's documented way

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument that only torch passes
        return f"SymbolicTensor({self.entry.dtype}, {list(self.entry.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a symbolic tensor of the same entry."""
        return memo.setdefault(id(self), type(self)(self.entry))  # type: ignore[no-any-return]

    # Torch's own would need memory, and equal addresses would look like tied tensors.
    __reduce_ex__ = _refusing("it pickles a tensor")
    tolist = _refusing("it reads elements with tolist()")
    numpy = _refusing("it reads elements with numpy()")
    data_ptr = _refusing("it asks for the address of a tensor")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the version that is switched off
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply one operation of torch to entries.

        Raises:
            CannotFollow: The operation does not only move elements.
        """
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        if name in _CREATIONS:
            options["device"] = options.get("device") or "cpu"
            return func(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), *args[1:], **options)
        follow = _OPERATIONS.get(name)
        dtype = options.get("dtype")
        if follow is None or not (dtype is None or dtype is args[0].dtype):
            raise CannotFollow(f"torch.{_PLAIN_NAMES.get(name, name)} computes elements, or is not supported")
        if name not in _OF_ALL and args[0].entry.composite is not None:
            raise CannotFollow(f"torch.{name} on a {args[0].entry.layout} tensor is not supported")
        try:
            result = follow(*args)
        except ValueError as error:
            raise CannotFollow(f"torch.{name}: {error}") from error
        return [cls(entry) for entry in result] if isinstance(result, list) else cls(result)


def entry_of_values(tensor: torch.Tensor) -> Entry:
    """Return an entry of the values of a real tensor: one constant box for each run of equal elements.

    Raises:
        CannotFollow: There are too many runs, or a value that the planner cannot hold exactly.
    """
    name = dtype_name(tensor.dtype)
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.is_meta or tensor.layout is not torch.strided:
        raise CannotFollow(f"a {type(tensor).__name__} of its own on {tensor.device} cannot be planned")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    exact = torch.float64 if is_castable(name) else torch.int64
    bits = flat.view(torch.uint8).view(-1, flat.itemsize)
    firsts = torch.cat([torch.arange(min(1, len(bits))), (bits[1:] != bits[:-1]).any(1).nonzero()[:, 0] + 1])
    if len(firsts) > defaults.RESHAPE_BOXES:
        raise CannotFollow(f"it makes a tensor of {len(firsts):,} different values")
    values = flat[firsts]
    held = values.to(exact)
    if not torch.equal(held.to(values.dtype).view(torch.uint8), values.view(torch.uint8)):
        raise CannotFollow(f"it makes a {name} tensor with values that cannot be planned")
    ends = [*firsts.tolist()[1:], flat.numel()]
    runs = [
        _constant(name, end - first, value)
        for first, end, value in zip(firsts.tolist(), ends, held.tolist(), strict=False)
    ]
    return reshape(join(runs or [_constant(name, 0, 0)], 0), tensor.shape)


def _constant(dtype: str, size: int, value: float) -> Entry:
    return Entry(elements=elements_of(dtype), shape=(size,), stride=(0,), storage=NO_STORAGE, constant=value)


def _entry(tensor: torch.Tensor) -> Entry:
    return tensor.entry if isinstance(tensor, SymbolicTensor) else entry_of_values(tensor)


def _same(tensor: SymbolicTensor, *_: object) -> Entry:
    return tensor.entry


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Entry:
    return join([_entry(tensor) for tensor in tensors], dim % tensors[0].dim())


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Entry:
    return stack([_entry(tensor) for tensor in tensors], dim % (tensors[0].dim() + 1))


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


#: Operations that need no elements of their argument, only its shape and dtype.
_CREATIONS = frozenset({"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"})

#: Operations on a sequence of tensors, and those that are possible for sparse and quantized ones.
_OF_ALL = frozenset({"_to_copy", "alias", "cat", "clone", "contiguous", "detach", "stack"})

#: Names that users write, for operations that torch calls otherwise.
_PLAIN_NAMES: Mapping[str, str] = {"_local_scalar_dense": "Tensor.item", "_to_copy": "Tensor.to"}

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
