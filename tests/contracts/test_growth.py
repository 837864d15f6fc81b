"""The memory contract for every format and verb, measured from outside: predicted is not less than measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice.benchmark.machine import make_cold
from support import growth_cases
from support.growth import FILES, MIB, Growth, measure_growth
from support.growth_cases import BROKEN, CASES, Case

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


def _marked(cases: Mapping[str, Case]) -> list[Any]:
    """Return the names of cases for ``parametrize``."""
    return [pytest.param(name, marks=[pytest.mark.long] * case.long) for name, case in cases.items()]


@pytest.fixture
def grow(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Growth]:
    """Return a function that makes the call of a case, by the name of its table and its own."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)

    def measure(table: str, name: str) -> Growth:
        case = getattr(growth_cases, table)[name]
        path = checkpoint(case.file) if case.file else tmp_path
        if case.cold:
            make_cold(path)
        return measure_growth(table, name, path, tmp_path)

    return measure


def _most_bytes(case: Case, grown: Growth) -> int:
    """Return the growth that is both allowed and, if the verb predicts any, predicted."""
    allowed = grown.allowed_bytes(case.staging_bytes)
    return allowed if grown.predicted_bytes is None else min(allowed, grown.predicted_bytes)


@pytest.mark.parametrize("name", _marked(CASES))
def test_growth_is_as_predicted_and_within_the_contract(name: str, grow: Callable[[str, str], Growth]) -> None:
    case, grown = CASES[name], grow("CASES", name)
    print(grown)  # pytest -s: the table of docs/performance-log.md
    if case.final_bytes:
        assert grown.final_bytes == case.final_bytes
    assert grown.measured_bytes >= 0.95 * grown.final_bytes  # the measurement sees the tensors
    assert grown.measured_bytes <= _most_bytes(case, grown)
    spare = 15 * MIB if grown.overhead_bytes < 128 * MIB else 0  # records of many tensors
    assert (grown.predicted_bytes or 0) <= grown.allowed_bytes(case.staging_bytes) - spare
    if grown.reported_bytes is not None:
        assert abs(grown.reported_bytes - grown.measured_bytes) <= max(4 * MIB, grown.measured_bytes // 32)


@pytest.mark.parametrize("name", _marked(BROKEN))
def test_a_defect_that_takes_memory_is_noticed(name: str, grow: Callable[[str, str], Growth]) -> None:
    grown = grow("BROKEN", name)
    assert grown.measured_bytes > _most_bytes(BROKEN[name], grown)
