"""``python -m bench.quantize``: medians, and the command on the smallest model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import _forms, quantize
from bench._forms_child import FORMS


def test_rows_are_medians_and_compare_the_bits() -> None:
    def run(seconds: float, bits: str) -> dict[str, Any]:
        return {"seconds": seconds, "peak": 20, "bytes": 10, "hash": bits}

    runs: dict[str, list[dict[str, Any]]] = {
        "a": [run(1.0, "x"), run(5.0, "x"), run(2.0, "x")],
        "b": [run(1.0, "x"), run(1.0, "y")],
        "c": [{"failed": "killed"}],
    }
    a, b, c = quantize.medians(runs)
    assert (a["seconds"], a["same"], b["same"], c["failed"]) == (2.0, True, False, "killed")


@pytest.mark.long
def test_the_command_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    root = Path(str(quantize.__file__)).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    methods = "sluice quantize=,sluice then quantize_,safetensors then quantize_"
    options = [
        "--size",
        "tiny",
        "--configs",
        "int8",
        "--rounds",
        "1",
        "--methods",
        methods,
        "--directory",
        str(tmp_path),
    ]
    done = CliRunner().invoke(quantize.main, options)
    assert done.exit_code == 0, done.output
    assert done.output.count("| yes") == 3


@pytest.mark.long
def test_the_forms_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    root = Path(str(quantize.__file__)).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    chosen = ("int8, streamed at 50 %", "fp32 from GGUF Q4_0")
    monkeypatch.setattr(_forms, "FORMS", {form: FORMS[form] for form in chosen})
    options = ["--forms", "--size", "tiny", "--directory", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    done = CliRunner().invoke(quantize.main, options)
    assert done.exit_code == 0, done.output
    streamed, decoded = json.loads((tmp_path / "rows.json").read_text())
    assert streamed["finished"] < decoded["finished"] <= decoded["predicted"]
    assert all(row["anonymous"] > 0 for row in (streamed, decoded))
