"""The engine's threads: readers and copiers, and cleanup after a failure at any point."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sluice._errors import TruncatedError
from sluice.engine.targets import Targets
from sluice.sources.local import LocalFile
from support.plans import MIB, Stored, execute

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
    copy_out = Targets.copy_out

    def noted(*args: object) -> None:
        names.add(threading.current_thread().name.rsplit("-", 1)[0])
        copy_out(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Targets, "copy_out", noted)
    tensor = torch.randn(ELEMENTS)
    assert torch.equal(cast(tmp_path / "f", tensor), tensor.bfloat16())
    assert names == {"sluice-copier"}


def test_if_no_copier_can_start_readers_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "copier" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    tensor = torch.randn(ELEMENTS)
    assert torch.equal(cast(tmp_path / "f", tensor), tensor.bfloat16())


@pytest.mark.parametrize("which", ["copy", "read"])
def test_the_kth_failure_reaches_the_caller_for_every_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    owner, name = (Targets, "copy_out") if which == "copy" else (LocalFile, "read_into")
    real = getattr(owner, name)
    tensor = torch.randn(ELEMENTS)
    calls = failing = 0

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(f"call {failing}")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, counted)
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

    def short(source: LocalFile, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        return read_into(source, offset, buffer, direct=direct) // 2

    monkeypatch.setattr(LocalFile, "read_into", short)
    with pytest.raises(TruncatedError, match="ends too early") as raised:
        cast(tmp_path / "f", torch.randn(ELEMENTS))
    assert raised.value.file == str(tmp_path / "f")
