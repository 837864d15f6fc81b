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
