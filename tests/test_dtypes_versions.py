"""dtypes that only some versions of torch have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice._dtypes import torch_dtype


def test_a_dtype_that_the_installed_torch_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3).to(torch.float8_e5m2)}, tmp_path / "f.pth")
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(sluice.UnsupportedError, match=r"torch .* has no dtype float8_e5m2; a later version"):
        sluice.load_state_dict(tmp_path / "f.pth")
    with pytest.raises(sluice.UnsupportedError, match="has no dtype print"):
        torch_dtype("print")
