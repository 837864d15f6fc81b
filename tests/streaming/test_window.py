"""The units that are in memory, and those that make room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sluice.streaming.window import Window


class _Unit:
    """A unit of one byte, whose reads never end."""

    nbytes, users, uses, ready = 1, 0, 0, False
    plan = SimpleNamespace(prepared=SimpleNamespace(plan=SimpleNamespace(read_bytes=1)))

    def __init__(self) -> None:
        self.started, self.looks = False, 0

    @property
    def held(self) -> bool:
        self.looks += 1
        return self.started

    def start(self, *_: object) -> None:
        self.started = True

    def settle(self) -> None:
        raise KeyboardInterrupt

    def drop(self) -> None:
        self.started = False


def test_an_interrupt_while_room_is_made_gives_the_memory_back_and_looks_at_units_in_memory_only() -> None:
    units, nothing = [_Unit() for _ in range(3)], SimpleNamespace()
    window = Window(units, nothing, most_bytes=1)  # type: ignore[arg-type]
    window.read_ahead([0])
    with pytest.raises(KeyboardInterrupt):
        window.acquire(1)
    assert not units[0].started
    assert not window._held_bytes
    assert not units[2].looks
