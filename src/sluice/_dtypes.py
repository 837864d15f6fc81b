"""The one table of dtypes.

Names are torch's own (``torch.float32`` is ``"float32"``), as strings, so that indexing never imports torch.
``torch_dtype`` is the one place where a name becomes a ``torch.dtype``; only layers that hold tensors call it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ITEM_BYTES", "dtype_name", "is_castable", "number_bytes", "torch_dtype", "why_no_cast"]

#: Bytes of one element of each dtype that a plain strided tensor can hold.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}

#: Real floating-point dtypes: the only ones that ``dtype=`` casts.
_REAL_FLOATS = frozenset(name for name in ITEM_BYTES if name.startswith(("float", "bfloat"))) - {
    "float4_e2m1fn_x2"  # packs two values in a byte: torch has no cast for it
}


def is_castable(name: str) -> bool:
    """Return whether ``dtype=`` applies to tensors of this dtype: real floating point, one value an element."""
    return name in _REAL_FLOATS


def why_no_cast(source: str, finished: str, *, requires_grad: bool) -> str | None:
    """Return why a tensor cannot become one of another dtype, or None."""
    complex_source, complex_finished = source.startswith("complex"), finished.startswith("complex")
    if complex_source and not complex_finished:
        return f"{source} cannot become {finished} without losing the imaginary part"
    if source != finished and "float4_e2m1fn_x2" in {source, finished}:
        return f"torch has no cast from {source} to {finished}"
    if requires_grad and not (complex_finished or is_castable(finished)):
        return f"a parameter that requires gradients cannot be {finished}"
    return None


def number_bytes(name: str) -> int:
    """Return the bytes that have an order: those of an element, of a complex one those of either half."""
    return ITEM_BYTES[name] // 2 if name.startswith("complex") else ITEM_BYTES[name]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a ``torch.dtype``: ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> Any:
    """Return the ``torch.dtype`` of this name; imports torch on first use.

    Raises:
        AttributeError: The installed torch is too old to know it.
    """
    import torch

    return getattr(torch, name)
