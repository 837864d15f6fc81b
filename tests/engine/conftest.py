"""Fixtures of this directory."""

from __future__ import annotations

import pytest

from sluice.sources.pages import FileWatch


@pytest.fixture(autouse=True)
def _files_stay_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read directly what the facts of a test call cold, although the test has just written it."""
    monkeypatch.setattr(FileWatch, "cached_share", lambda *_: 0.0)
