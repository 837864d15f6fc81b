"""Functions of torch by what they do to tensors without memory; see ``constructor_calls``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from sluice.modules.meta_initialisers import INITIALISERS

# torch passes its own private functions to modes.
# ruff: noqa: SLF001

__all__ = [
    "ARRAYS",
    "CASTS",
    "CHANGES",
    "CLONES",
    "CONTIGUOUS",
    "FACTORIES",
    "INITIALISER_NAMES",
    "LAZY",
    "LIKE",
    "NOT_DEFERRED",
    "NUMBERS",
    "OVERWRITING",
    "PRESERVING",
    "READERS",
    "UNCHANGED",
    "changed_by",
]

_T: Any = torch.Tensor


def _getters(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_T, name).__get__ for name in names)


#: Functions that neither read nor change values, and whose results are the same on meta.
UNCHANGED = _getters(
    "dtype", "grad", "grad_fn", "is_leaf", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape", "_version"
) | frozenset({
    _T.dim, _T.element_size, _T.is_complex, _T.is_contiguous, _T.is_floating_point, _T.numel, _T.nelement, _T.size,
    _T.stride, _T.storage_offset, _T.requires_grad_, _T.requires_grad.__set__, _T.grad.__set__, _T.__len__,
    _T.untyped_storage, _T.ndimension, torch._C._set_grad_enabled, torch._has_compatible_shallow_copy_type,
    torch.is_floating_point, torch.is_complex, torch.numel,
    _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__,
})  # fmt: skip

#: Functions whose results are deferred.
FACTORIES = frozenset({torch.empty, torch.full, torch.ones, torch.zeros})
#: Arguments with which they are not.
NOT_DEFERRED = frozenset({"layout", "names", "out", "pin_memory", "requires_grad", "memory_format"})

NUMBERS = {bool, int, float, complex}

#: Functions that leave deferred tensors deferred: deterministic, and without results other than tensors.
LAZY = _getters("data", "T", "mT") | frozenset({
    torch.tril, torch.triu, _T.tril, _T.triu, _T.tril_, _T.triu_, torch.logical_not, _T.logical_not, _T.__invert__,
    _T.bitwise_not, _T.masked_fill, _T.masked_fill_, _T.view, _T.reshape, _T.unsqueeze, _T.squeeze, _T.expand,
    _T.detach, _T.bool, _T.float, _T.half, _T.bfloat16, _T.double, _T.contiguous, _T.clone, _T.transpose, _T.t,
    _T.permute, _T.flatten, _T.fill_, _T.zero_, nn.init.constant_,
})  # fmt: skip

#: Functions whose results have the shape and dtype of their tensor and are contiguous; on meta, torch would import its
#: compiler for them.
CONTIGUOUS = frozenset({torch.tril, torch.triu, _T.tril, _T.triu})

#: Functions that copy a tensor in its own layout, likewise; and the memory formats that mean it.
CLONES = frozenset({torch.clone, _T.clone})
PRESERVING = (None, torch.preserve_format)

#: Functions that change values and nothing else, and are not run on meta.
CHANGES = INITIALISERS | {_T.tril_, _T.triu_}

#: Functions that need values, and give wrong ones or an error on meta.
READERS = frozenset({
    _T.item, _T.tolist, _T.numpy, _T.__array__, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__complex__,
    _T.__contains__, _T.equal, _T.allclose, _T.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero,
    _T.__dlpack__,
})  # fmt: skip
#: Readers whose arrays share memory with the tensor: they are read-only, because what is written there cannot be seen.
ARRAYS = frozenset({_T.numpy, _T.__array__})

#: Functions that make a tensor like another one, without its values.
LIKE = frozenset({
    torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randint_like, torch.randn_like,
    torch.zeros_like, _T.new, _T.new_empty, _T.new_full, _T.new_ones, _T.new_tensor, _T.new_zeros,
})  # fmt: skip

#: Casts, which keep parameters and buffers empty when a module is cast.
CASTS = frozenset({_T.half, _T.float, _T.double, _T.bfloat16, _T.bool, _T.int, _T.long})

#: Initialisers that write every element.
OVERWRITING = INITIALISERS - {_T.clamp_, _T.erfinv_}

#: Initialisers by name: libraries wrap those of ``torch.nn.init``, and torch then passes the wrapper.
INITIALISER_NAMES = {function.__name__: function for function in INITIALISERS if isinstance(function, FunctionType)}

#: Names of the operators that change their first argument. The names of other functions that do end in ``_``.
_IN_PLACE_OPERATORS = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip


def changed_by(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments that a call changes, by the name of its function; None in place of those it has not."""
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if args else options.get("tensor")
    return target if in_place else None, options.get("out")
