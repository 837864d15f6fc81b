"""CRC-32 of data from the CRCs of its pieces, in any order.

CRC-32 is the remainder of the data, as a polynomial over GF(2), and so linear: the CRC of the whole is the sum
(exclusive or) of the CRCs of its pieces, each multiplied by x to the power of the number of bits that follow the piece.
This is zlib's ``crc32_combine``, for any number of pieces.
"""

from __future__ import annotations

from functools import cache

__all__ = ["moved"]

#: The polynomial of CRC-32, bit-reversed.
_POLYNOMIAL = 0xEDB88320


def moved(crc: int, nbytes: int) -> int:
    """Return the contribution of a piece's CRC to that of the whole, if ``nbytes`` bytes follow the piece."""
    return _product(_power(nbytes), crc) if nbytes else crc


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
