"""``python -m bench.merge`` runs the merges that it can, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench import merge


def test_merges_are_compared(tmp_path: Path) -> None:
    options = ["--size=tiny", "--runs=1", f"--out={tmp_path / 'out'}", "--inputs=2", "--method=swa"]
    done = CliRunner().invoke(merge.main, options)
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "out" / "merge.json").read_text(encoding="utf-8"))["seconds"]
    assert list(seconds) == ["swa, sluice", "swa, torch"]
