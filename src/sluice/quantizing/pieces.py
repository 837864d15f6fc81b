"""Pieces of rows of a weight, quantized one by one where the result has the same bits.

Whether it has them is tried on random rows, not declared: a scale for the whole weight, for example, would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from sluice._threads import Workers
from sluice.quantizing.functions import SingleWeight
from sluice.quantizing.inner_tensors import inner_tensors

__all__ = ["Pieces", "fill_in_pieces", "find_pieces", "piece_bytes", "pieces_transient_bytes"]

#: Bytes of the pieces that are quantized at the same time, if the bounds of a piece allow it.
_ALL_BYTES = 4 << 20

#: Bounds of a piece in bytes. With 4 MiB the heap keeps twice as much for the next piece, and nothing is faster.
_LEAST_BYTES, _MOST_BYTES = 128 << 10, 1 << 20

#: Bytes of a piece on an accelerator, which starts each operation for many elements.
_DEVICE_BYTES = 32 << 20

#: Memory of one call of a function of torchao or bitsandbytes on the CPU and what the heap keeps for the next, in
#: multiples of a piece. Measured: up to 5.
_TRANSIENT = 6

#: Rows of each of the two pieces with which it is tried; the rows of a piece are a multiple.
_ROWS = 64

#: How the inner tensors of a weight are divided: size of the first dimension of each for ``_ROWS`` rows; 0 if every
#: piece has the same.
Pieces: TypeAlias = tuple[int, ...]

#: How much larger the values of the second piece are, so that a shared exponent of both would be seen too.
_SCALE = 37


def find_pieces(
    single: SingleWeight, parameter: nn.Parameter, template: torch.Tensor, device: torch.device
) -> Pieces | None:
    """Return how a weight is quantized in pieces; None if the result would have other bits.

    Args:
        single: The weight.
        parameter: The parameter on the meta device, before.
        template: Its finished form on the meta device.
        device: Where it is quantized.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2 * _ROWS, *parameter.shape[1:]), generator=generator, device="cpu")
    rows[_ROWS:] *= _SCALE
    rows = rows.to(device, parameter.dtype)
    try:
        whole, one, other = (_inner(single, part) for part in (rows, rows[:_ROWS], rows[_ROWS:]))
        rest = _inner(single, parameter.new_empty((len(parameter) % _ROWS, *parameter.shape[1:])))
    except Exception:  # noqa: BLE001  a scalar has no rows, and the function may need other numbers, such as whole blocks
        return None
    finished = list(inner_tensors(template))
    if not len(finished) == len(whole) == len(one) == len(other):
        return None
    steps = []
    for position, full in enumerate(finished):
        if _equal(whole[position], one[position]) and _equal(whole[position], other[position]):
            step, size = 0, whole[position].shape[:1]
        elif whole[position].dim() and _equal(whole[position], torch.cat([one[position], other[position]])):
            step = len(one[position])
            size = torch.Size([len(parameter) // _ROWS * step + (len(rest[position]) if len(parameter) % _ROWS else 0)])
        else:
            return None
        if full.shape != size + whole[position].shape[1:]:
            return None
        steps.append(step)
    return tuple(steps)


def _inner(single: SingleWeight, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of rows, which are not changed; nothing for no rows."""
    return list(inner_tensors(single.quantized(rows.clone()))) if len(rows) else []


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bits."""
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def piece_bytes(cores: int, device: torch.device) -> int:
    """Return the bytes of a piece, in the dtype in which it is quantized, if each core of the host quantizes one."""
    if device.type != "cpu":
        return _DEVICE_BYTES
    return max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_BYTES // cores))


def pieces_transient_bytes(cores: int, device: torch.device) -> int:
    """Return the memory that quantizing pieces takes for a moment."""
    return _TRANSIENT * piece_bytes(cores, device) * (cores if device.type == "cpu" else 1)


def fill_in_pieces(
    single: SingleWeight,
    pieces: Pieces,
    inner: Sequence[torch.Tensor],
    workers: Workers,
    whole: torch.Tensor,
    *,
    nbytes: int,
) -> None:
    """Quantize pieces of rows of a weight, of about ``nbytes``, into the inner tensors of its finished form."""
    step = max(1, nbytes // max(1, whole[:1].nbytes) // _ROWS) * _ROWS
    fills = [partial(_fill_piece, single, pieces, inner, whole, first, step) for first in range(0, len(whole), step)]
    if whole.device.type != "cpu":  # in the order of its stream
        for fill in fills:
            fill()
        return
    for task in [workers.start(fill) for fill in fills]:
        task.result()


def _fill_piece(
    single: SingleWeight, pieces: Pieces, inner: Sequence[torch.Tensor], whole: torch.Tensor, first: int, rows: int
) -> None:
    # Grad and inference mode belong to each thread.
    with torch.inference_mode(mode=False), torch.no_grad():
        # A copy: a function may keep rows that need no change as a view of the weight.
        found = inner_tensors(single.quantized(whole[first : first + rows].clone()))
        for target, part, step in zip(inner, found, pieces, strict=True):
            if step:
                target[first // _ROWS * step :][: len(part)].copy_(part)
            elif first == 0:
                target.copy_(part)
