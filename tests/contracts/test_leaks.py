"""The leak check that every test uses."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest

from support.leaks import Holdings


def test_nothing_is_reported_when_all_is_given_back() -> None:
    before = Holdings.now()
    os.close(os.open(os.devnull, os.O_RDONLY))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert before.left_behind() == []


def test_an_open_descriptor_is_reported() -> None:
    before = Holdings.now()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        assert before.left_behind() == [f"open descriptor: {os.devnull}"]
    finally:
        os.close(descriptor)


def test_a_running_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.leaks._THREAD_GRACE", 0.0)
    before = Holdings.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    try:
        assert before.left_behind() == ["running thread: forgotten"]
    finally:
        stop.set()
        thread.join()


def test_a_temporary_file_is_reported() -> None:
    before = Holdings.now()
    with tempfile.NamedTemporaryFile() as file:
        assert f"temporary file: {os.path.basename(file.name)}" in before.left_behind()
