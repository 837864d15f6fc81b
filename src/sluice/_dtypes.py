"""Table of dtypes: item sizes, and which casts exist.

A dtype is represented by torch's name for it (``"float32"`` for ``torch.float32``), so that indexing never imports
torch. Only ``torch_dtype`` converts a name to a ``torch.dtype``, and only layers that hold tensors call it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sluice._errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ITEM_BYTES",
    "MAX_SIGNED",
    "DType",
    "dtype_name",
    "is_castable",
    "number_bytes",
    "parse_dtype",
    "torch_dtype",
    "why_no_cast",
]

#: Type of every ``dtype=`` argument: ``torch.bfloat16``, ``"bfloat16"``, ``"torch.bfloat16"``, ``"bf16"``, or
#: ``"auto"`` for the dtypes of the checkpoint.
DType: TypeAlias = "torch.dtype | str"

#: Largest size, stride or offset in torch, which counts elements and bytes in signed 64-bit integers.
MAX_SIGNED = 2**63 - 1

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

#: Other names of real floating-point dtypes: those of torch, of training libraries, and of safetensors headers.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "float64": ("double", "fp64", "F64"),
    "float32": ("float", "fp32", "F32"),
    "bfloat16": ("bf16", "BF16"),
    "float16": ("half", "fp16", "F16"),
    "float8_e4m3fn": ("F8_E4M3",),
    "float8_e5m2": ("F8_E5M2",),
    "float8_e8m0fnu": ("F8_E8M0",),
}

#: dtype by each of its names in lower case.
_BY_NAME = {name: name for name in ITEM_BYTES} | {
    other.lower(): name for name, others in _OTHER_NAMES.items() for other in others
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


def parse_dtype(dtype: object, *, auto: bool = True, floats_only: bool = False) -> str:
    """Return the name of a dtype that a caller wrote, or ``"auto"``.

    Args:
        dtype: A ``torch.dtype``; or a text: torch's name with or without ``torch.``, a usual short name, or ``"auto"``.
        auto: Whether ``"auto"`` is accepted.
        floats_only: Whether integer, bool and complex dtypes are refused.

    Raises:
        ValueError: It is none of these; the text lists the accepted names.
    """
    if isinstance(dtype, str):
        name = _parse_name(dtype)
    else:
        is_dtype = (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype")
        name = dtype_name(dtype) if is_dtype else None
    if name == "auto" and auto:
        return name
    if name not in ITEM_BYTES or (floats_only and not is_castable(name)):
        kind = "the floating-point dtypes " if floats_only else ""
        raise ValueError(f"dtype {dtype!r} is not one of {kind}{_accepted(auto=auto, floats_only=floats_only)}")
    return name


@lru_cache(maxsize=64)
def _parse_name(text: str) -> str | None:
    name = text.strip().lower().removeprefix("torch.")
    return "auto" if name == "auto" else _BY_NAME.get(name)


def _accepted(*, auto: bool, floats_only: bool) -> str:
    floats = sorted(_REAL_FLOATS, key=lambda name: (-len(_OTHER_NAMES.get(name, ())), name))
    names = [f"{name} ({', '.join(_OTHER_NAMES[name])})" if name in _OTHER_NAMES else name for name in floats]
    text = ", ".join(["auto (the dtypes of the checkpoint)", *names] if auto else names)
    return text if floats_only else f"{text}; or {', '.join(name for name in ITEM_BYTES if not is_castable(name))}"
