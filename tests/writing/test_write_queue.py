"""The queue of writes: every byte once, consumers in order, errors raised to the caller, no write after the block."""

from __future__ import annotations

import threading

import pytest
import torch

from sluice import _defaults as defaults
from sluice._errors import SaveError
from sluice.writing.chunks import Staging
from sluice.writing.write_queue import write_queue

_BYTES = 3 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "WRITE_BYTES", 100_000)


@pytest.mark.parametrize("nbytes", [0, defaults.DIRECT_FILE_BYTES], ids=["caller's thread", "workers"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("consumed", [False, True])
def test_every_byte_is_written_once(nbytes: int, *, transposed: bool, consumed: bool) -> None:
    tensor = torch.arange(_BYTES // 4, dtype=torch.int32).reshape(1024, -1)
    tensor = tensor.t() if transposed else tensor
    expected = tensor.contiguous().numpy().tobytes()
    out, counts, hashed, reported = bytearray(_BYTES), bytearray(_BYTES), bytearray(), [0]

    def put(at: int, piece: memoryview) -> None:
        out[at : at + len(piece)] = piece
        for position in (at, at + len(piece) - 1):
            counts[position] += 1

    def wrote(count: int) -> None:
        reported[0] += count

    with write_queue(nbytes, Staging.make(1 << 18), wrote) as queue:
        queue.write(tensor, "int32", 64, put, hashed.extend if consumed else None)
    assert out == expected
    assert set(counts) == {0, 1}
    assert bytes(hashed) == (expected if consumed else b"")
    assert reported == [_BYTES]


def test_a_failed_write_reaches_the_caller_after_all_others_have_ended() -> None:
    before = threading.active_count()
    started = threading.Event()

    def put(at: int, piece: memoryview) -> None:
        started.set()
        if at:
            raise SaveError("disk full")

    with (
        pytest.raises(SaveError, match="disk full"),
        write_queue(defaults.DIRECT_FILE_BYTES, Staging.make(1 << 18), lambda _: None) as queue,
    ):
        queue.write(torch.zeros(_BYTES, dtype=torch.uint8), "uint8", 0, put)
    assert started.is_set()
    assert threading.active_count() == before
