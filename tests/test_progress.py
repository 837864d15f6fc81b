"""Progress events and their receivers."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._progress import Progress, ProgressEvent, byte_progress, progress_sink
from sluice._public import explain_keywords


def _event(done: int, total: int = 4096, seconds: float = 1.0) -> ProgressEvent:
    return ProgressEvent(done_bytes=done, total_bytes=total, seconds=seconds)


def test_false_listens_to_nothing() -> None:
    with progress_sink(False, "loading") as sink:
        assert sink is None


def test_a_function_receives_the_events_themselves() -> None:
    events: list[ProgressEvent] = []
    with progress_sink(events.append, "loading") as sink:
        assert sink is not None
        sink(_event(1))
        sink(_event(2))
    assert events == [_event(1), _event(2)]


@pytest.mark.parametrize("progress", [None, 1, "yes", 0.5])
def test_anything_else_is_a_type_error(progress: object) -> None:
    with pytest.raises(TypeError, match="progress must be"), progress_sink(cast("Any", progress), "loading"):
        pass


def test_the_bar_shows_bytes_and_speed_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_sink(True, "loading [red]") as sink:
        assert sink is not None
        for done in (0, 1 << 20, 3 << 20):
            sink(_event(done, total=3 << 20))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loading [red]" in captured.err
    assert "3.0/3.0 MiB" in captured.err
    assert "B/s" in captured.err or "?" in captured.err


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
    with progress_sink(True, "/a/long/path" * 20 + "/model.pth") as sink:
        assert sink is not None
        sink(_event(123 << 30, total=567 << 30, seconds=100.0))
    shown = capsys.readouterr().err
    assert "/model.pth" in shown
    assert "123.0/567.0 GiB" in shown


def test_the_bar_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.enumerate()
    with progress_sink(True, "loading") as sink:
        assert sink is not None
        sink(_event(1))
        assert threading.enumerate() == before
    assert threading.enumerate() == before


def test_the_bar_ends_when_the_load_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        with progress_sink(True, "loading") as sink:
            assert sink is not None
            sink(_event(1))
            assert "loading" not in capsys.readouterr().err  # without a terminal, only the end is drawn
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        load()
    assert "loading" in capsys.readouterr().err


@given(total=st.integers(0, 1 << 60), done=st.integers(0, 1 << 60))
def test_the_fraction_runs_from_0_to_1(total: int, done: int) -> None:
    assert 0.0 <= _event(min(done, total), total=total).fraction <= 1.0
    assert _event(total, total=total).fraction == 1.0


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        _event(1).done_bytes = 2  # type: ignore[misc]  # what the test is about
