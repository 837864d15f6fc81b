"""A file of tensors that take several reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.wide_tensors import tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "f.pth"
    torch.save(tensors(), path)
    return path
