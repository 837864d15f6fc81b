"""CRC-32 of data from the CRCs of its pieces, in any order.

CRC-32 is the remainder of the data, as a polynomial over GF(2), and so linear: the CRC of the whole is the sum
(exclusive or) of the CRCs of its pieces, each multiplied by x to the power of the number of bits that follow the piece.
This is zlib's ``crc32_combine``, for any number of pieces.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["moved", "sum_moved"]

#: The polynomial of CRC-32, bit-reversed.
_POLYNOMIAL = 0xEDB88320

#: Fewer CRCs are moved one by one.
_FEW = 8


def moved(crc: int, nbytes: int) -> int:
    """Return the contribution of a piece's CRC to that of the whole, if ``nbytes`` bytes follow the piece."""
    return _product(_power(nbytes), crc) if nbytes else crc


def sum_moved(crcs: npt.NDArray[np.uint32], following: npt.NDArray[np.int64]) -> int:
    """Return the sum of the contributions of many pieces.

    Args:
        crcs: CRC of each piece.
        following: Number of bytes that follow each piece in the whole.
    """
    if len(crcs) < _FEW:
        total = 0
        for crc, nbytes in zip(crcs.tolist(), following.tolist(), strict=True):
            total ^= moved(crc, nbytes)
        return total
    sums = crcs.copy()
    for bit in range(int(following.max()).bit_length()):
        chosen = np.flatnonzero(following >> bit & 1)
        sums[chosen] = _multiplied(sums[chosen], bit)
    return int(np.bitwise_xor.reduce(sums))


def _multiplied(crcs: npt.NDArray[np.uint32], bit: int) -> npt.NDArray[np.uint32]:
    """Return CRCs that ``1 << bit`` bytes follow."""
    tables = _tables(bit)
    product: npt.NDArray[np.uint32] = (
        tables[0][crcs & 255] ^ tables[1][crcs >> 8 & 255] ^ tables[2][crcs >> 16 & 255] ^ tables[3][crcs >> 24]
    )
    return product


@cache
def _tables(bit: int) -> tuple[npt.NDArray[np.uint32], ...]:
    """Return the products of ``1 << bit`` bytes with every value of each byte of a CRC."""
    power = _squares()[bit + 3]
    tables = []
    for byte in range(4):
        table = np.zeros(1, np.uint32)
        for position in range(8):
            table = np.concatenate([table, table ^ np.uint32(_product(power, 1 << (8 * byte + position)))])
        tables.append(table)
    return tuple(tables)


@cache
def _squares() -> tuple[int, ...]:
    """Return x to the powers 1, 2, 4, ... modulo the polynomial."""
    powers = [1 << 30]
    while len(powers) < 64:
        powers.append(_product(powers[-1], powers[-1]))
    return tuple(powers)


def _power(nbytes: int) -> int:
    """Return x to the power of the bits in ``nbytes`` bytes, modulo the polynomial."""
    result, left, square = 1 << 31, nbytes * 8, 0
    while left:
        if left & 1:
            result = _product(_squares()[square], result)
        left >>= 1
        square += 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo ``_POLYNOMIAL``; the highest bit is the lowest power."""
    bit, product = 1 << 31, 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
