"""``python -m bench.quantize``: medians, and the command on the smallest model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import quantize
from sluice.benchmark.records import Outcome


def test_rows_are_medians_and_compare_the_bits() -> None:
    def run(seconds: float, bits: str) -> Outcome:
        return Outcome(status="ok", seconds=seconds, total_bytes=20, facts={"bytes": 10, "hash": bits})

    runs = {
        "a": [run(1.0, "x"), run(5.0, "x"), run(2.0, "x")],
        "b": [run(1.0, "x"), run(1.0, "y")],
        "c": [Outcome(status="killed", reason="out of memory")],
    }
    a, b, c = quantize.section("int8", runs).rows
    assert a == ("a", "2.00", "20 B", "10 B", "yes")
    assert (b[-1], c[-1]) == ("NO", "out of memory")


@pytest.mark.long
def test_the_command_on_a_small_model(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    methods = ("sluice quantize=", "sluice then quantize_", "safetensors then quantize_")
    options = ["--size", "tiny", "--config", "int8", "--runs", "1", "--directory", str(tmp_path / "in")]
    options += ["--out", str(tmp_path / "out"), *(f"--method={name}" for name in methods)]
    done = CliRunner().invoke(quantize.main, options)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "quantize.md").read_text().count("| yes |") == 3
