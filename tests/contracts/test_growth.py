"""The memory contract for every format and verb, measured from outside: predicted is not less than measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.growth import measure_growth
from support.growth_cases import CASES, evict
from support.growth_files import FILES

pytestmark = [
    pytest.mark.usefixtures("fresh_processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="the peak is the kernel's own record"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a checkpoint when its first case needs it."""
    folder = tmp_path_factory.mktemp("growth")

    def make(name: str) -> Path:
        path = folder / name
        if not path.exists():
            FILES[name](path)
        return path

    return make


MARKED = [pytest.param(name, marks=[pytest.mark.long] * case.long) for name, case in CASES.items()]


@pytest.mark.parametrize("name", MARKED)
def test_growth_is_as_predicted_and_within_the_contract(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    path = checkpoint(case.file)
    if case.cold:
        evict(path)
    grown = measure_growth("support.growth_cases", "CASES", name, str(path), str(tmp_path))
    print(grown)  # pytest -s: the table of docs/contracts.md
    if case.final_bytes:
        assert grown.final_bytes == case.final_bytes
    assert grown.measured_bytes >= 0.95 * grown.final_bytes  # the measurement sees the tensors
    assert grown.measured_bytes <= grown.allowed_bytes(case.staging_bytes)
    if grown.predicted_bytes is not None:
        assert grown.measured_bytes <= grown.predicted_bytes <= grown.allowed_bytes(case.staging_bytes)
