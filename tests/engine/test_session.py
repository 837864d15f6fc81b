"""The engine's threads, and cleanup after a failure at any point; small plans, which need no thread and no staging."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice._errors import TruncatedError
from sluice.engine.targets import Targets
from sluice.sources.local import LocalFile
from support.oracles import same
from support.plans import MIB, Stored, execute
from support.watching import watch

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
    calls = failing = 0

    def count(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(f"call {failing}")

    watch(monkeypatch, owner, name, count)
    while True:
        failing, calls = failing + 1, 0
        try:
            loaded = cast(tmp_path / "f", tensor)
        except OSError as error:
            assert str(error) == f"call {failing}"
            continue
        break
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
