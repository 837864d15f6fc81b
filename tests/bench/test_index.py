"""``python -m bench.index``: when a goal counts as reached, and the command itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from bench.index import Row, main


def test_when_a_goal_is_kept() -> None:
    row = Row(what="a file", ours=1.0, theirs=3.0, reference="a library", goal=1 / 3)
    assert row.kept
    assert not replace(row, ours=1.1).kept
    assert replace(row, tensor_bytes=1024).kept
    assert not replace(row, tensor_bytes=1025).kept


@pytest.mark.long
def test_the_command_on_small_files() -> None:
    done = CliRunner().invoke(main, ["--tensors", "200", "--shards", "3", "--runs", "1"])
    assert done.exit_code in {0, 1}, done.output  # the goals do not apply to this small number of tensors
    for what in ("torch.save, zip", "torch.save, legacy", "safetensors", "3 shards"):
        assert what in done.output
