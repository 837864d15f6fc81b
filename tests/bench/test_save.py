"""``python -m bench.save`` runs every case and prints medians and ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import save
from sluice.benchmark.gpt2 import random_state_dict


@pytest.mark.long
def test_saves_are_made_by_processes_of_their_own_and_removed(tmp_path: Path) -> None:
    chosen = ["transposed: sluice.save .safetensors"]
    options = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(save.main, [*options, *(f"--method={name}" for name in chosen)])
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "out" / "save.json").read_text(encoding="utf-8"))["seconds"]
    assert list(seconds) == chosen
    assert all(each > 0 for runs in seconds.values() for each in runs)
    assert list((tmp_path / "in").iterdir()) == []
    assert f"| {chosen[0]} |" in (tmp_path / "out" / "save.md").read_text(encoding="utf-8")


def test_every_way_to_save_writes_the_weights(tmp_path: Path) -> None:
    state = dict(random_state_dict("tiny", torch.float32))
    sizes = {}
    for name, method in save.METHODS.items():
        path = tmp_path / f"f{method.suffix}"
        method.save(state, path)
        sizes[name] = path.stat().st_size
        path.unlink()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    for name, size in sizes.items():
        expected = nbytes // 2 if "bf16" in name else nbytes
        assert expected <= size < expected + (1 << 20), name
