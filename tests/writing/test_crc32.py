"""CRCs of pieces combined, compared with zlib's CRC of the whole."""

from __future__ import annotations

import random
import zlib

from sluice.writing.crc32 import moved


def test_a_far_piece_agrees_with_zlib() -> None:
    data = random.Random(1).randbytes(1000)
    whole = zlib.crc32(data + bytes(10_000_000))
    assert moved(zlib.crc32(data), 10_000_000) ^ zlib.crc32(bytes(10_000_000)) == whole


def test_distances_of_terabytes_agree_with_steps() -> None:
    """zlib itself cannot check them: the same distance in one step and in two gives the same sum."""
    assert moved(97_654_321, (1 << 42) + 12_345) == moved(moved(97_654_321, 1 << 42), 12_345)
