"""Fixtures for tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.command_line import MODEL_MODULE, state_dict


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module that builds models, and ``net.pth`` for one; neither stays after the test."""
    (tmp_path / "cli_model.py").write_text(MODEL_MODULE)
    torch.save(state_dict(), tmp_path / "net.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_model", raising=False)
    return tmp_path
