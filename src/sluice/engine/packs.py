"""The computation of elements: arithmetic with numbers, casts, and decoders of packs, as in GGUF files.

Elements are computed between a staging buffer and their target, each by itself, so that a tensor may be cut anywhere.

A decoder gets ``(packs, bytes of a pack)`` and fills ``(packs, elements of a pack)`` in float32, on the same device. It
allocates no float32 tensor of that size, which would stay in the heap of each thread. The operations and their order
are those of ``gguf.quants``, so that the results have the same bits. Codes with tables of values, and rare ones, are
decoded by that package itself, which takes several times as long. Numbers in a pack are little-endian. Names follow
ggml: ``d`` is a scale, ``m`` or ``dmin`` a minimum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod
from typing import TypeAlias

import numpy as np
import torch

from sluice import _defaults as defaults
from sluice.entries.slicing import boxes
from sluice.records import Arithmetic, Packing

__all__ = ["DECODERS", "Decoder", "Steps", "compute", "decode_packs", "scratch"]

#: Operations with a number, one after the other.
Steps: TypeAlias = Iterable[tuple[Arithmetic, float]]


def compute(target: torch.Tensor, elements: torch.Tensor, steps: Steps = ()) -> None:
    """Compute each step in the dtype of the elements, and copy the result, cast to the target's dtype."""
    for operation, number in steps:
        elements = getattr(elements, operation)(number)
    target.copy_(elements)


class _Scratch(threading.local):
    """Memory of a thread that is used again for every copy; what was written is gone after the next use.

    If each copy allocated its own, malloc kept 30 MiB of them in the arena of each thread.
    """

    bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of_at_least(self, nbytes: int) -> torch.Tensor:
        """Return at least ``nbytes`` bytes."""
        if self.bytes.numel() < nbytes:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # not torch's default device
        return self.bytes


scratch = _Scratch()

Decoder: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]


def decode_packs(target: torch.Tensor, packs: torch.Tensor, packing: Packing, steps: Steps = ()) -> None:
    """Decode packs, a piece at a time, and compute a target from the elements.

    Args:
        target: One dimension more than the fill: the last is ``packing.elements``.
        packs: The packs, as bytes: the same first dimensions, and then ``packing.nbytes``.
        packing: Their code.
        steps: As for ``compute``.
    """
    shape = packs.shape[:-1]
    decoder = DECODERS.get(packing.name) or _by_package(packing.name)
    most = max(defaults.CAST_PIECE_ELEMENTS, defaults.DECODED_ELEMENTS // torch.get_num_threads())
    for key in boxes(tuple(shape), max(1, most // packing.elements)):
        piece = packs[key]
        count = prod(piece.shape[:-1])
        decoded = _room(count * packing.elements, packs.device).view(count, packing.elements)
        decoder(piece.reshape(count, packing.nbytes), decoded)
        compute(target[key], decoded.view(*piece.shape[:-1], packing.elements), steps)


def _room(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for float32 numbers; on the host, that of this thread."""
    if device.type != "cpu":
        return torch.empty(count, dtype=torch.float32, device=device)
    return scratch.of_at_least(4 * count)[: 4 * count].view(torch.float32)


@cache
def _by_package(name: str) -> Decoder:
    """Return a decoder that calls the package gguf, on the host."""
    from gguf import GGMLQuantizationType, quants  # an extra; most files need no code of it

    code = GGMLQuantizationType[name]

    def decode(packs: torch.Tensor, into: torch.Tensor) -> None:
        with np.errstate(all="ignore"):  # damaged scales may be infinite, as in torch
            into.copy_(torch.from_numpy(quants.dequantize(packs.cpu().numpy(), code)))

    return decode


def _half(packs: torch.Tensor, first: int) -> torch.Tensor:
    """Return the float16 number at a byte of each pack as float32: ``(packs, 1)``."""
    own = packs[:, first : first + 2].clone(memory_format=torch.contiguous_format)  # packs begin at any address
    return own.view(torch.float16).float()


def _bits(numbers: torch.Tensor, width: int, groups: int) -> torch.Tensor:
    """Return fields of ``width`` bits of each byte, the lowest first, one field of a whole group after the other.

    Args:
        numbers: Bytes: ``(packs, n)``.
        width: Bits of one field; ``8 // width`` fields are in a byte.
        groups: Number of groups that the bytes are divided into.
    """
    count = len(numbers)
    whole = numbers.reshape(count, groups, -1)
    # One shift of all bytes after the other: a tensor of shifts takes longer.
    fields = [whole & ((1 << width) - 1)]
    fields += [(whole >> shift) & ((1 << width) - 1) for shift in range(width, 8 - width, width)]
    fields.append(whole >> (8 - width))
    return torch.stack(fields, 2).view(count, -1)


def _fifth_bits(packs: torch.Tensor, first: int) -> torch.Tensor:
    """Return the 32 bits of four bytes, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packs.device)
    return ((packs[:, first : first + 4, None] >> shifts) & 1).reshape(len(packs), 32)


def _q4_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(_bits(packs[:, 2:], 4, 1).view(torch.int8).sub_(8)).mul_(_half(packs, 0))


def _q4_1(packs: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(_bits(packs[:, 4:], 4, 1)).mul_(_half(packs, 0)).add_(_half(packs, 2))


def _q5_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    numbers = _bits(packs[:, 6:], 4, 1) | (_fifth_bits(packs, 2) << 4)
    into.copy_(numbers.view(torch.int8).sub_(16)).mul_(_half(packs, 0))


def _q5_1(packs: torch.Tensor, into: torch.Tensor) -> None:
    numbers = _bits(packs[:, 8:], 4, 1) | (_fifth_bits(packs, 4) << 4)
    into.copy_(numbers).mul_(_half(packs, 0)).add_(_half(packs, 2))


def _q8_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(packs[:, 2:].view(torch.int8)).mul_(_half(packs, 0))


def _q2_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """256 elements: 16 bytes of scales and minima, 64 of two bits each, d, dmin."""
    scales, count = packs[:, :16], len(packs)
    d = (_half(packs, 80) * (scales & 15)).view(count, 16, 1)
    m = (_half(packs, 82) * (scales >> 4)).view(count, 16, 1)
    into.copy_(_bits(packs[:, 16:80], 2, 2)).view(count, 16, 16).mul_(d).sub_(m)


def _q3_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """256 elements: 32 bytes of third bits, 64 of two bits each, 12 of scales, d."""
    count = len(packs)
    low, high = _bits(packs[:, 96:104], 4, 1), _bits(packs[:, 104:108], 2, 1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    d = (_half(packs, 108) * scales).view(count, 16, 1)
    third = _bits(packs[:, :32], 1, 1) ^ 1  # the offset is 0 where the bit is set
    numbers = _bits(packs[:, 32:96], 2, 2).view(torch.int8) - (third << 2).view(torch.int8)
    into.copy_(numbers).view(count, 16, 16).mul_(d)


def _scales_and_minima(packs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of the eight groups of a Q4_K or Q5_K pack: ``(packs, 8, 1)`` each."""
    d, m, rest = packs[:, 4:8], packs[:, 8:12], packs[:, 12:16]
    scales = torch.cat([d & 63, (rest & 15) | ((d >> 2) & 48)], 1)
    minima = torch.cat([m & 63, (rest >> 4) | ((m >> 2) & 48)], 1)
    return (_half(packs, 0) * scales).unsqueeze(2), (_half(packs, 2) * minima).unsqueeze(2)


def _q4_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """256 elements: d, dmin, 12 bytes of scales and minima, 128 of four bits each."""
    d, m = _scales_and_minima(packs)
    into.copy_(_bits(packs[:, 16:], 4, 4)).view(len(packs), 8, 32).mul_(d).sub_(m)


def _q5_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """256 elements: d, dmin, 12 bytes of scales and minima, 32 of fifth bits, 128 of four bits each."""
    d, m = _scales_and_minima(packs)
    numbers = _bits(packs[:, 48:], 4, 4) | (_bits(packs[:, 16:48], 1, 1) << 4)
    into.copy_(numbers).view(len(packs), 8, 32).mul_(d).sub_(m)


def _q6_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """256 elements: 128 bytes of four bits each, 64 of two bits each, 16 of scales, d."""
    d = (_half(packs, 208) * packs[:, 192:208].view(torch.int8)).unsqueeze(2)
    numbers = _bits(packs[:, :128], 4, 2) | (_bits(packs[:, 128:192], 2, 2) << 4)
    into.copy_(numbers.view(torch.int8).sub_(32)).view(len(packs), 16, 16).mul_(d)


#: The decoder of each code.
DECODERS: Mapping[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
