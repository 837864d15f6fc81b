"""Fixtures of tests of streams: a model that is saved, and the same without memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.streamed_models import Layers, empty, saved


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


@pytest.fixture
def model(file: Path) -> Layers:
    """Return a model that is saved in the file."""
    return saved(Layers, file)


@pytest.fixture
def running(model: Layers) -> Layers:
    """Return the same without memory."""
    return empty(Layers)
