"""Preparation of a measured process."""

from __future__ import annotations

import mmap
from unittest.mock import Mock

import pytest

from sluice.benchmark import child


@pytest.mark.parametrize(("nbytes", "claimed"), [(1 << 40, 3 << 20), (1 << 20, 1 << 20)])
def test_no_more_memory_is_claimed_than_is_free(monkeypatch: pytest.MonkeyPatch, nbytes: int, claimed: int) -> None:
    made = Mock(wraps=mmap.mmap)
    monkeypatch.setattr(child, "free_memory_bytes", lambda: 4 << 20)
    monkeypatch.setattr(mmap, "mmap", made)
    child.touch_free_memory(nbytes)
    assert made.call_args.args[1] == claimed
