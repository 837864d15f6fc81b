"""Comparison of tensors as numbers, block by block.

Blocks with equal bytes are equal; only the others are converted. Floating-point numbers are compared as float64, which
holds every value of the narrower dtypes, integers as 64-bit integers, and an integer with a floating-point number as
float64.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from sluice._dtypes import dtype_name

__all__ = ["Comparison"]

_Array = np.ndarray[Any, np.dtype[Any]]

#: Elements compared together, so that both sides stay in the cache of a processor as float64.
_BLOCK_ELEMENTS = 1 << 15

#: A dtype with two values per byte and without conversions: only its bytes are compared.
_PACKED = "float4_e2m1fn_x2"


class Comparison:
    """The differences of one pair of tensors so far. Pieces may arrive in any order and from any thread.

    Two elements are the same if they are equal as numbers (0.0 and -0.0 are) or both NaN, with any bits; a complex
    element with a NaN part is NaN. With tolerances, they are also the same if ``|a - b| <= atol + rtol * |b|``.

    Attributes:
        different: Number of elements that are not the same.
        nan: Number of these elements that are NaN on one side only.
        max_abs: Largest ``|a - b|`` of the other elements; infinite if one side is.
        max_rel: Largest ``|a - b| / max(|a|, |b|)`` of the other elements: at most 2, or infinite.
    """

    def __init__(self, *, rtol: float, atol: float) -> None:
        self.different = 0
        self.nan = 0
        self.max_abs = 0.0
        self.max_rel = 0.0
        self._rtol = rtol
        self._atol = atol
        self._lock = threading.Lock()

    def update(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two pieces of the same shape, both row-major on the host."""
        ours, theirs = a.flatten(), b.flatten()
        same_dtype = a.dtype == b.dtype
        for first in range(0, ours.numel(), _BLOCK_ELEMENTS):
            left, right = ours[first : first + _BLOCK_ELEMENTS], theirs[first : first + _BLOCK_ELEMENTS]
            if not (same_dtype and np.array_equal(_words(left), _words(right))):
                self._compare(left, right)

    def _compare(self, left: torch.Tensor, right: torch.Tensor) -> None:
        if _PACKED in {dtype_name(left.dtype), dtype_name(right.dtype)}:
            differ = np.count_nonzero(_bytes(left) != _bytes(right)) if left.dtype == right.dtype else left.numel()
            with self._lock:
                self.different += int(differ)
            return
        a, b = _numbers(left), _numbers(right)
        with np.errstate(all="ignore"):
            unequal = ~_same(a, b)
            if not unequal.any():
                return
            a, b = a[unequal], b[unequal]
            absolute = _distance(a, b)
            odd = np.isnan(a) ^ np.isnan(b) if a.dtype.kind in "fc" or b.dtype.kind in "fc" else np.zeros(len(a), bool)
            size_b = np.abs(b.astype(np.complex128 if b.dtype.kind == "c" else np.float64))
            size_a = np.abs(a.astype(np.complex128 if a.dtype.kind == "c" else np.float64))
            absolute = np.where(np.isnan(absolute) & ~odd, np.inf, absolute)  # infinite parts of complex numbers
            relative = absolute / np.maximum(size_a, size_b)
            relative = np.where(np.isnan(relative) & ~odd, np.inf, relative)  # both are infinite
            close = np.isfinite(absolute) & (absolute <= self._atol + self._rtol * size_b)
            close &= bool(self._atol or self._rtol)  # a distance between large integers can round to 0
        self._add(odd, absolute[~(close | odd)], relative[~(close | odd)])

    def _add(self, odd: _Array, absolute: _Array, relative: _Array) -> None:
        with self._lock:
            self.nan += int(odd.sum())
            self.different += int(odd.sum()) + len(absolute)
            if len(absolute):
                self.max_abs = max(self.max_abs, float(absolute.max()))
                self.max_rel = max(self.max_rel, float(relative.max()))


def _bytes(tensor: torch.Tensor) -> _Array:
    array: _Array = tensor.view(torch.uint8).numpy()
    return array


def _words(tensor: torch.Tensor) -> _Array:
    """Return the bytes of a piece as 64-bit words if their number is a multiple of eight."""
    raw = _bytes(tensor)
    return raw.view(np.uint64) if len(raw) % 8 == 0 else raw


def _numbers(tensor: torch.Tensor) -> _Array:
    if tensor.is_complex():
        wide = tensor.to(torch.complex64).to(torch.complex128) if tensor.dtype == torch.complex32 else tensor
        return np.asarray(wide.to(torch.complex128).numpy())
    if tensor.is_floating_point():
        # Dtypes of one byte can only be converted to float32.
        return np.asarray((tensor.to(torch.float32) if tensor.itemsize == 1 else tensor).to(torch.float64).numpy())
    whole = tensor.numpy()
    return whole if whole.dtype == np.uint64 else whole.astype(np.int64)


def _same(a: _Array, b: _Array) -> _Array:
    equal = np.asarray(a == b)
    floating = a.dtype.kind in "fc" or b.dtype.kind in "fc"
    return equal | (np.isnan(a) & np.isnan(b)) if floating else equal


def _distance(a: _Array, b: _Array) -> _Array:
    """Return ``|a - b|`` as float64; for integers of one sign, the exact distance rounded."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        # As unsigned 64-bit integers the distance is always exact.
        return np.asarray((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).astype(np.float64))
    wide = np.complex128 if "c" in {a.dtype.kind, b.dtype.kind} else np.float64
    return np.asarray(np.abs(a.astype(wide) - b.astype(wide)))
