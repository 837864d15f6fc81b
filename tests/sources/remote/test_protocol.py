"""Bodies that arrive in pieces."""

from __future__ import annotations

from sluice.sources.remote.protocol import PieceBody


def test_pieces_of_any_size_fill_buffers_of_any_size() -> None:
    with PieceBody(iter([b"ab", b"", b"cdefg", b""])) as body:
        found = []
        while (count := body.readinto(buffer := memoryview(bytearray(3)))) > 0:
            found.append(bytes(buffer[:count]))
    assert found == [b"ab", b"cde", b"fg"]
    assert not body.readinto(memoryview(bytearray(3)))
