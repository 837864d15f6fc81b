"""Fixtures for tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command_line import MODEL_MODULE


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module that builds models; neither stays after the test."""
    (tmp_path / "cli_model.py").write_text(MODEL_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_model", raising=False)
    return tmp_path
