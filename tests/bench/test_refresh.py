"""``python -m bench.refresh`` at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.refresh import main


@pytest.mark.long
def test_the_command_at_a_tiny_size(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--runs", "1", "--megabytes", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "sluice.refresh, 11 %" in done.output
