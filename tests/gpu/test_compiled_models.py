"""``torch.compile`` on a loaded model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Disable the leak check: the compiler keeps helper processes, threads and files for later use."""
    return iter([None])


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # the compiler logs many warnings
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_computes_with_loaded_weights(tmp_path: Path, device: str, backend: str) -> None:
    if backend == "inductor" and not device.startswith("cuda"):
        pytest.skip("inductor has no code generator for the simulated device")
    if backend == "inductor" and shutil.which("cc") is None:
        pytest.skip("inductor needs a C compiler")
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).eval()
    torch.save(expected.state_dict(), tmp_path / "f.pth")
    with sluice.empty_init():
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).eval()
    sluice.load_into(model, tmp_path / "f.pth", device=device)
    compiled = torch.compile(model, backend=backend)
    tokens = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens.to(device)).cpu(), expected(tokens), rtol=1e-2, atol=1e-2)

        for parameter in expected.parameters():
            parameter.add_(0.1)
        torch.save(expected.state_dict(), tmp_path / "f.pth")
        sluice.load_into(model, tmp_path / "f.pth")  # in place: no recompilation
        torch.testing.assert_close(compiled(tokens.to(device)).cpu(), expected(tokens), rtol=1e-2, atol=1e-2)
    torch.compiler.reset()
