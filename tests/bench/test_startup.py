"""``python -m bench.startup``: the command itself."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bench.startup import main


@pytest.mark.long
def test_the_command() -> None:
    done = CliRunner().invoke(main, ["--runs", "1"])
    assert done.exit_code in {0, 1}, done.output  # 1: a goal was missed, which depends on the machine
    for what in ("load_into, .pth", "load_into, .safetensors", "load_state_dict", "empty_init", "sluice inspect, wall"):
        assert what in done.output
