"""The engine's threads, and cleanup after a failure at any point; small plans, which need no thread and no staging.

Sessions that run several plans: shared threads and staging, failures, and finishers.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import sluice
from sluice._errors import ReadError, TruncatedError
from sluice.engine.running_plan import RunningPlan, SessionEndedError
from sluice.engine.session import Session
from sluice.engine.targets import Targets
from sluice.records import Finisher, LoadPlan, View
from sluice.sources.local import LocalFile
from support.oracles import same
from support.plans import MIB, Stored, entry_of, execute, request
from support.waiting import wait_until
from support.watching import raising, watch

ELEMENTS = 9 * MIB // 4


def cast(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Load one float32 tensor as bfloat16, cold, through 8 MiB of staging."""
    with Stored(path, [tensor]) as stored:
        plan, views = stored.plan(0, dtype="bfloat16")
        assert plan.readers > plan.copiers == 2
        memory = Targets(plan)
        execute(plan, [stored.source], memory)
        return memory.tensors(views)[0]


def test_copiers_empty_what_readers_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    watch(monkeypatch, Targets, "copy_out", lambda *_: names.add(threading.current_thread().name.rsplit("-", 1)[0]))
    tensor = torch.randn(ELEMENTS)
    assert torch.equal(cast(tmp_path / "f", tensor), tensor.bfloat16())
    assert names == {"sluice-copier"}


@pytest.mark.parametrize("which", ["copier", ""], ids=["no copier", "no thread"])
def test_threads_that_cannot_start_leave_their_work_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def refuse(thread: threading.Thread) -> None:
        if which in thread.name:
            raise RuntimeError("can't start new thread")

    watch(monkeypatch, threading.Thread, "start", refuse)
    tensor = torch.randn(ELEMENTS)
    assert torch.equal(cast(tmp_path / "f", tensor), tensor.bfloat16())


@pytest.mark.parametrize("which", ["copy", "read"])
def test_the_kth_failure_reaches_the_caller_for_every_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    owner, name = (Targets, "copy_out") if which == "copy" else (LocalFile, "read_into")
    tensor = torch.randn(ELEMENTS)
    for failing in itertools.count(1):
        with monkeypatch.context() as patch:
            watch(patch, owner, name, raising(failing, OSError(f"call {failing}")))
            try:
                loaded = cast(tmp_path / "f", tensor)
                break
            except OSError as error:
                assert str(error) == f"call {failing}"
    assert failing > 5
    assert torch.equal(loaded, tensor.bfloat16())


def test_a_read_that_ends_early_is_an_error_though_the_file_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = LocalFile.read_into
    monkeypatch.setattr(LocalFile, "read_into", lambda *a, **options: read_into(*a, **options) // 2)
    with pytest.raises(TruncatedError, match="ends too early") as raised:
        cast(tmp_path / "f", torch.randn(ELEMENTS))
    assert raised.value.file == str(tmp_path / "f")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.fixture(params=["safetensors", "pth"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path, expected = tmp_path / f"f.{request.param}", model().state_dict()
    torch.save(expected, path) if request.param == "pth" else sluice.save(expected, path)
    return path, expected


def test_live_tensors_need_no_staging(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Targets, "copy_out", lambda *_: pytest.fail("bytes were staged"))
    live = model()
    sluice.load_into(live, saved[0])
    assert same(live.state_dict(), saved[1])


def _partly(read: Callable[..., int], descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    return read(descriptor, buffers[:1], offset)


def _refused(read: Callable[..., int], descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    if len(buffers) > 1:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(descriptor, buffers, offset)


@pytest.mark.parametrize("fault", [_partly, _refused])
def test_what_one_call_does_not_read_is_staged(
    saved: tuple[Path, dict[str, torch.Tensor]], fault: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: fault(read, *arguments))
    live = model()
    report = sluice.load_into(live, saved[0])
    assert same(live.state_dict(), saved[1])
    assert report.reads["buffered"] == report.read_bytes


class Weights(Stored):
    def plan(self, *numbers: int, dtype: str = "bfloat16", **changes: Any) -> tuple[LoadPlan, tuple[View, ...]]:
        return super().plan(*numbers, dtype=dtype, **changes)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    with Weights(tmp_path / "f", [torch.randn(MIB // 2) for _ in range(6)]) as made:
        yield made


def test_plans_share_threads_and_staging(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, started = set[object](), list[str]()
    watch(monkeypatch, Targets, "begin", lambda _, staging: pools.add(staging))
    watch(monkeypatch, threading.Thread, "start", lambda thread: started.append(thread.name))
    with closing(Session([weights.source])) as session:
        for number in range(6):
            plan, views = weights.plan(number)
            targets = Targets(plan)
            session.start(plan, targets).wait()
            assert torch.equal(targets.tensors(views)[0], weights.tensors[number].bfloat16())
    assert len(pools) == 1
    assert len(started) == len(set(started)) <= plan.readers + plan.copiers


def test_runs_may_be_awaited_in_any_order(weights: Weights) -> None:
    with closing(Session([weights.source])) as session:
        plans = [weights.plan(number) for number in range(6)]
        larger, views = plans[1]  # its buffers differ
        plans[1] = replace(larger, staging_buffer_bytes=2 * larger.staging_buffer_bytes), views
        targets = [Targets(plan) for plan, _ in plans]
        running = [session.start(plan, each) for (plan, _), each in zip(plans, targets, strict=True)]
        for run in reversed(running):
            run.wait()
        for number, ((_, views), each) in enumerate(zip(plans, targets, strict=True)):
            assert torch.equal(each.tensors(views)[0], weights.tensors[number].bfloat16())


def test_a_failure_ends_the_session_and_every_plan_in_it(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFile, "read_into", mock.Mock(side_effect=ReadError("broken", file="f", offset=0)))
    finished: list[int] = []
    watch(monkeypatch, Targets, "finish", lambda targets: finished.append(id(targets)))
    with closing(Session([weights.source])) as session:
        first, second = (weights.plan(number)[0] for number in (0, 1))
        running = session.start(first, Targets(first)), session.start(second, Targets(second))
        with pytest.raises(ReadError, match="broken"):
            running[0].wait()
        assert session.ended
        with pytest.raises((SessionEndedError, ReadError)):
            running[1].wait()
        with pytest.raises(SessionEndedError):
            session.start(first, Targets(first))
    assert len(finished) == len(set(finished)) == 2


def test_a_session_that_is_left_early_joins_its_threads(weights: Weights) -> None:
    plan, _ = weights.plan(*range(6))
    with closing(Session([weights.source])) as session:
        session.start(plan, Targets(plan))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sluice-")]


def test_staging_grows_and_is_released(weights: Weights) -> None:
    with closing(Session([weights.source])) as session:
        for numbers in ((0,), tuple(range(6)), (1,)):
            plan, views = weights.plan(*numbers)
            targets = Targets(plan)
            session.start(plan, targets).wait()
            session.release_staging()
            found = targets.tensors(views)
            assert all(torch.equal(one, weights.tensors[i].bfloat16()) for one, i in zip(found, numbers, strict=True))


def test_a_finisher_replaces_the_weight_and_releases_its_memory(weights: Weights) -> None:
    finisher = Finisher(name="halve", shape=(1024, MIB // 2 // 1024), finished_sizes=(4096,))
    plan, views = weights.plan(*range(6), dtype="float32", finisher=finisher)
    shapes = []

    def halve(whole: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(whole.shape))
        return whole.sum(1)

    targets = Targets(plan, finishers={"halve": halve})
    execute(plan, [weights.source], targets)
    for tensor, whole in zip(targets.tensors(views), weights.tensors, strict=True):
        assert torch.equal(tensor, whole.view(1024, -1).sum(1))
    assert shapes == [finisher.shape] * 6
    assert not targets._mappings
    assert not targets._flats


def test_readers_wait_for_finishers(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ``most_unfinished_reads`` run ahead of a slow finisher, as predicted."""
    finisher = Finisher(name="slow", shape=(MIB // 2,), finished_sizes=())
    plan, _ = weights.plan(*range(6), dtype="float32", finisher=finisher)
    plan = replace(plan, most_unfinished_reads=2)
    under_way: list[int] = []
    taken = finished = 0
    next_reads = RunningPlan.next_reads

    def counted(run: RunningPlan) -> object:
        nonlocal taken
        reads = next_reads(run)
        taken += len(reads)
        under_way.append(taken - finished)
        return reads

    monkeypatch.setattr(RunningPlan, "next_reads", counted)

    def slow(whole: torch.Tensor) -> torch.Tensor:
        nonlocal finished
        finished += 1
        return whole[:0].clone()

    execute(plan, [weights.source], Targets(plan, finishers={"slow": slow}))
    assert taken == len(plan.reads)
    assert max(under_way) <= 3  # two permits, and one that is released when its result was taken


def test_a_failing_finisher_reaches_the_caller(weights: Weights) -> None:
    finisher = Finisher(name="fails", shape=(MIB // 2,), finished_sizes=())
    plan, _ = weights.plan(0, 1, dtype="float32", finisher=finisher)
    fails = mock.Mock(side_effect=ValueError("this weight cannot be quantized"))
    with pytest.raises(ValueError, match="cannot be quantized"):
        execute(plan, [weights.source], Targets(plan, finishers={"fails": fails}))


def test_a_plan_whose_reads_were_done_before_a_failure_is_complete(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow failure of one plan: the next one was read meanwhile, and its data is whole."""
    second_is_read = threading.Event()

    def fail_slowly(_: LocalFile, offset: int, *__: object, **___: object) -> None:
        if offset < weights.tensors[0].nbytes:
            second_is_read.wait(30)
            raise ReadError("broken", file="f", offset=offset)

    watch(monkeypatch, LocalFile, "read_into", fail_slowly)
    first, second = (weights.plan(*numbers, dtype="float32") for numbers in ((0, 1), (4,)))
    targets = Targets(second[0])
    with closing(Session([weights.source])) as session:
        failing, running = session.start(first[0], Targets(first[0])), session.start(second[0], targets)
        wait_until(lambda: running.results.qsize() == len(second[0].reads), "the reads of the second plan")
        second_is_read.set()
        with pytest.raises(ReadError, match="broken"):
            failing.wait()
        running.wait()
    assert torch.equal(targets.tensors(second[1])[0], weights.tensors[4])


def test_without_threads_finishers_still_keep_up(weights: Weights) -> None:
    finisher = Finisher(name="note", shape=(MIB // 2,), finished_sizes=())
    plan, _ = weights.plan(*range(6), dtype="float32", finisher=finisher)
    plan = replace(plan, readers=0)
    held: list[int] = []

    def note(whole: torch.Tensor) -> torch.Tensor:
        held.append(len(targets._mappings))
        return whole[:0].clone()

    targets = Targets(plan, finishers={"note": note})
    execute(plan, [weights.source], targets)
    assert held == [0] * 6  # the weight that is being finished has left the list


def test_a_finisher_gets_a_transposed_weight_row_major_and_an_empty_one(weights: Weights) -> None:
    square = entry_of(weights.tensors[0], 0)
    turned = replace(square, shape=(512, 1024), stride=(1, 512))
    empty = replace(square, shape=(0,), stride=(1,))
    requests = [
        replace(request("t", turned), finisher=Finisher(name="copy", shape=(512, 1024), finished_sizes=())),
        replace(request("e", empty), finisher=Finisher(name="copy", shape=(0,), finished_sizes=())),
    ]
    plan, views = weights.plan_of(requests)
    assert plan.final_bytes == 0
    seen = []

    def copy(whole: torch.Tensor) -> torch.Tensor:
        seen.append(whole.clone())
        return whole.clone()

    targets = Targets(plan, finishers={"copy": copy})
    execute(plan, [weights.source], targets)
    assert torch.equal(targets.tensors(views)[0], weights.tensors[0].view(1024, 512).T)
    assert [tuple(each.shape) for each in seen] == [(512, 1024), (0,)]
