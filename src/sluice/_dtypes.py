"""Table of dtypes: item sizes, and which casts exist.

A dtype is represented by torch's name for it (``"float32"`` for ``torch.float32``), so that indexing never imports
torch. Only ``torch_dtype`` converts a name to a ``torch.dtype``, and only layers that hold tensors call it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sluice._errors import UnsupportedError

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
    """Return whether ``dtype=`` applies to tensors of this dtype: real floating point, one value per element."""
    return name in _REAL_FLOATS


def why_no_cast(source: str, finished: str, *, requires_grad: bool) -> str | None:
    """Return why a tensor of dtype ``source`` cannot be cast to ``finished``; None if it can."""
    complex_source, complex_finished = source.startswith("complex"), finished.startswith("complex")
    if complex_source and not complex_finished:
        return f"{source} cannot become {finished} without losing the imaginary part"
    if source != finished and "float4_e2m1fn_x2" in {source, finished}:
        return f"torch has no cast from {source} to {finished}"
    if requires_grad and not (complex_finished or is_castable(finished)):
        return f"a parameter that requires gradients cannot be {finished}"
    return None


def number_bytes(name: str) -> int:
    """Return the bytes of one real number: those of an element, or of either half of a complex element."""
    return ITEM_BYTES[name] // 2 if name.startswith("complex") else ITEM_BYTES[name]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a ``torch.dtype``: ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> Any:
    """Return the ``torch.dtype`` with this name; imports torch on first use.

    Raises:
        UnsupportedError: The installed torch does not have this dtype.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {name}; a later version of torch may have it")
    return dtype
