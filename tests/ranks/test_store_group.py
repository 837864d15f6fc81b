"""Decisions of ranks through a store: on threads with a store in memory and a clock that the test moves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sluice import _defaults as defaults
from sluice.ranks.judgement import StepOutcome
from sluice.ranks.store_group import StoreGroup, _Contribution
from support.waiting import SkippedTime


class Store(HashStore):
    """A store in memory, which may stop answering."""

    fails = False

    def __getattribute__(self, name: str) -> Any:
        if name != "fails" and self.fails:
            raise RuntimeError("Connection reset by peer")
        return super().__getattribute__(name)


class Clock(SkippedTime):
    """A clock of which each pause takes a tenth of the group's patience."""

    def sleep(self, _: float) -> None:
        super().sleep(defaults.RANK_PATIENCE_SECONDS / 10)


def joined(answers: Mapping[int, bytes]) -> StepOutcome:
    return StepOutcome(value=b",".join(answers[rank] for rank in sorted(answers)))


def group(store: Any, rank: int, *, clock: Clock | None = None, state: str = "running") -> StoreGroup:
    """Return a rank of two that loads; ``state`` is that of the other one's process."""
    own = StoreGroup(
        store,
        rank,
        (0, 1),
        state=lambda *_: state,
        clock=clock or time.monotonic,
        sleep=clock.sleep if clock else time.sleep,
        turns=threading.Lock(),
    )
    own.join("load_into")
    return own


def both(groups: list[StoreGroup], step: str, *, last: bool = False) -> list[StepOutcome]:
    with ThreadPoolExecutor(len(groups)) as pool:
        done = [pool.submit(each.decide, step, str(each.rank).encode(), joined, last=last) for each in groups]
        return [each.result() for each in done]


def test_keys_of_past_calls_are_deleted() -> None:
    """A job that loads for weeks does not fill the store."""
    store, sizes = Store(), []
    for _ in range(5):
        both([group(store, rank) for rank in (0, 1)], "done", last=True)
        sizes.append(store.num_keys())
    assert sizes[1] == sizes[-1]


def test_a_failure_that_a_rank_announced() -> None:
    store = Store()
    groups = [group(store, rank) for rank in (0, 1)]
    groups[1].warn("no disk")
    groups[1].warn("a second failure, because of the first")
    assert [verdict.failed for verdict in both(groups, "read")] == [{1: "no disk"}] * 2
    assert both([group(store, rank) for rank in (0, 1)], "read") == [StepOutcome(value=b"0,1")] * 2, "the next call"


def test_ranks_that_read_notice_a_failure() -> None:
    store, clock = Store(), Clock()
    reading, other = group(store, 0, clock=clock), group(store, 1)
    clock.now += defaults.RANK_LOOK_SECONDS
    assert not reading.look()
    other.warn("no disk")
    assert not reading.look(), "it asks the store once a second"
    clock.now += defaults.RANK_LOOK_SECONDS
    assert reading.look()


def test_a_sign_of_life_is_enough() -> None:
    """A rank that reads for hours is waited for."""
    store: Any = Store()
    clock = Clock()
    own, other = group(store, 0, clock=clock), group(store, 1)
    signs = 0

    def sleep(seconds: float) -> None:
        nonlocal signs
        signs += 1
        clock.sleep(seconds)
        store.set(other._key("pulse/1"), str(signs).encode())
        if signs == 50:
            contribution = _Contribution(value=b"1", state="untouched")
            store.set(other._key("read/1"), msgspec.msgpack.encode(contribution))

    own._sleep = sleep
    assert own.decide("read", b"0", joined) == StepOutcome(value=b"0,1")


@pytest.mark.parametrize("leads", [True, False])
def test_an_interrupt_while_waiting(leads: bool) -> None:
    """It is a failure for every rank, and not an exception that leaves the others waiting."""
    store, rank = Store(), 0 if leads else 1
    own, other = group(store, rank), group(store, 1 - rank)
    waits, sleep = 0, own._sleep

    def interrupted(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            raise KeyboardInterrupt
        sleep(seconds)

    own._sleep = interrupted
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(own.decide, "read", b"", joined)
        while not store.check([own._key(f"warning/{rank}")]):
            sleep(0.001)
        assert other.decide("read", b"", joined) == mine.result()
        assert mine.result().failed == {rank: "KeyboardInterrupt"}
    assert own.interrupted


def test_an_interrupt_after_the_verdict_does_not_change_it() -> None:
    store = Store()
    own, other = group(store, 1), group(store, 0)
    raised = False

    def interrupted(_: float) -> None:
        nonlocal raised
        if not raised:
            raised = True
            assert other.decide("read", b"0", joined) == StepOutcome(value=b"0,1")
            raise KeyboardInterrupt

    own._sleep = interrupted
    assert own.decide("read", b"1", joined) == StepOutcome(value=b"0,1")
    assert own.interrupted


def test_a_store_that_does_not_answer() -> None:
    """The process that serves it was killed."""
    store = Store()
    own = group(store, 1)
    store.fails = True
    own.warn("no rank can be told")
    assert "Connection reset by peer" in own.decide("read", b"", joined).failed[0]


def test_a_rank_that_died_between_two_calls_is_named_at_once() -> None:
    """Its process is known since the first call."""
    store = Store()
    both([group(store, rank) for rank in (0, 1)], "done", last=True)
    clock = Clock()
    failed = group(store, 0, clock=clock, state="gone").decide("meet", b"", joined).failed
    assert "is gone" in failed[1]
    assert sum(clock.pauses) < defaults.RANK_PATIENCE_SECONDS / 5


@pytest.mark.parametrize("leads", [True, False])
def test_a_word_about_the_rank_that_is_missing(caplog: pytest.LogCaptureFixture, leads: bool) -> None:
    store, rank = Store(), 0 if leads else 1
    clock = Clock()
    clock.sleep = lambda _: setattr(clock, "now", clock.now + 1.0)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "sluice"):
        group(store, rank, clock=clock).decide("meet", b"", joined)
    assert (
        caplog.messages[0]
        == f"sluice.load_into on rank {rank} has waited 10 s: rank {1 - rank} has not called sluice yet"
    )
    assert len(caplog.messages) == 5, "after 10, 20, 40, 80 and 160 seconds"
