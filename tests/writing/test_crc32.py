"""CRCs of pieces combined, compared with zlib's CRC of the whole."""

from __future__ import annotations

import itertools
import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from sluice.writing.crc32 import moved


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=30))
def test_pieces_in_any_number_sum_to_the_crc_of_the_whole(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[first:last] for first, last in itertools.pairwise(edges)]
    total = 0
    for piece, last in zip(pieces, edges[1:], strict=True):
        total ^= moved(zlib.crc32(piece), len(data) - last)
    assert total == zlib.crc32(data)


def test_a_far_piece_agrees_with_zlib() -> None:
    data = random.Random(1).randbytes(1000)
    whole = zlib.crc32(data + bytes(10_000_000))
    assert moved(zlib.crc32(data), 10_000_000) ^ zlib.crc32(bytes(10_000_000)) == whole


def test_distances_of_terabytes_agree_with_steps() -> None:
    """zlib itself cannot check them: the same distance in one step and in two gives the same sum."""
    assert moved(97_654_321, (1 << 42) + 12_345) == moved(moved(97_654_321, 1 << 42), 12_345)
