"""transformers without progress bars and threads; tests are skipped if it is not installed."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sluice[hf]'")
    found.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
