"""Progress events and their receivers."""

from __future__ import annotations

import errno
import io
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._progress import Progress, ProgressEvent, byte_progress
from sluice._public import explain_keywords


def _event(done: int, total: int = 4096, seconds: float = 1.0) -> ProgressEvent:
    return ProgressEvent(done_bytes=done, total_bytes=total, seconds=seconds)


def test_the_bar_shows_bytes_and_speed_on_stderr_only_and_starts_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as at a terminal
    before = threading.enumerate()
    with byte_progress(False, "loading", 1) as report:
        assert report is None
    with byte_progress(True, "loading [red]", 3 << 20) as report:
        assert report is not None
        for done in (0, 1 << 20, 3 << 20):
            report(done)
        sys.stdout.write("by others\n")
        assert threading.enumerate() == before
    captured = capsys.readouterr()
    assert captured.out == "by others\n"
    for shown in ("loading [red]", "3.0/3.0 MiB", "GB/s"):
        assert shown in captured.err


def test_the_bar_counts_from_the_call_as_the_report_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    @explain_keywords
    def load(progress: Progress) -> None:
        clock[0] += 3  # opening and planning
        with byte_progress(progress, "loading", 8_000_000_000) as report:
            assert report is not None
            clock[0] += 1
            report(8_000_000_000)

    events: list[ProgressEvent] = []
    load(events.append)
    assert [event.seconds for event in events] == [4.0]
    load(True)
    assert "2.00 GB/s" in capsys.readouterr().err


def test_a_long_path_leaves_space_for_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with byte_progress(True, "/a/long/path" * 20 + "/model.pth", 567 << 30) as report:
        assert report is not None
        report(123 << 30)
    shown = capsys.readouterr().err
    assert "/model.pth" in shown
    assert "123.0/567.0 GiB" in shown


def test_the_bar_ends_when_the_load_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        with byte_progress(True, "loading", 4096) as report:
            assert report is not None
            report(1)
            assert "loading" not in capsys.readouterr().err  # without a terminal, only the end is drawn
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        load()
    assert "loading" in capsys.readouterr().err


class Unread(io.StringIO):
    """A stream whose reader is gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, ""), OSError(errno.EIO, "gone"), ValueError("closed")])
def test_a_bar_without_a_reader_does_not_end_the_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(sys, "stderr", Unread(error))
    with byte_progress(True, "loading", 2) as report:
        assert report is not None
        for done in range(3):
            report(done)


@given(total=st.integers(0, 1 << 60), done=st.integers(0, 1 << 60))
def test_the_fraction_runs_from_0_to_1(total: int, done: int) -> None:
    assert 0.0 <= _event(min(done, total), total=total).fraction <= 1.0
    assert _event(total, total=total).fraction == 1.0
