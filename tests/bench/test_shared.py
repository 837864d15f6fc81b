"""``python -m bench.shared`` at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.shared import main


@pytest.mark.long
def test_the_command_at_a_tiny_size(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--size=tiny", "--runs=2", "--processes=2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert not any("sluice-bench" in path.name for path in Path("/dev/shm").iterdir())
