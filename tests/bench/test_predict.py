"""Predicted peaks of every way to load, compared with measurements of fresh processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.predict import DTYPES, Comparison, compare, make_files
from sluice.benchmark.records import Outcome, Precision
from sluice.benchmark.strategies import STRATEGIES
from support import fresh_process

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _forked(fresh_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the measured processes from one that has imported torch."""
    monkeypatch.setattr("sluice.benchmark.process.subprocess", fresh_process.SUBPROCESS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files("small", tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(("method", "dtype"), [("naive", "float32"), ("mmap", "bfloat16"), ("sluice", "bfloat16")])
def test_a_small_model(tiny: dict[str, Path], method: str, dtype: Precision) -> None:
    """33 MiB in the file, so that one copy more or fewer exceeds the permitted error."""
    (found,) = compare("tiny", tiny, [dtype], [method])
    assert found.outcome.status == "ok", found.outcome.reason
    assert abs(found.error_bytes) <= 28 * MIB, found


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [method.name for method in STRATEGIES])
def test_predictions_keep_what_is_promised(small: dict[str, Path], method: str, dtype: Precision) -> None:
    (found,) = compare("small", small, [dtype], [method])
    assert found.holds, found


@pytest.mark.parametrize(
    ("method", "measured", "error", "holds"),
    [
        ("sluice", 100, 32, True),
        ("sluice", 100, 33, False),
        ("sluice", 1000, 50, True),
        ("sluice", 1000, -51, False),
        ("naive", 100, 64, True),
        ("naive", 1000, 100, True),
        ("naive", 1000, -101, False),
    ],
)
def test_what_is_promised(method: str, measured: int, error: int, holds: bool) -> None:
    outcome = Outcome(status="ok", total_bytes=measured * MIB)
    predicted = (measured + error) * MIB
    assert Comparison(method=method, dtype="float32", predicted_bytes=predicted, outcome=outcome).holds is holds
