"""``python -m bench.save`` and ``bench.verify`` run every case and print medians and ratios."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bench
from bench import save, verify
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.records import Kind
from support import fresh_process


@pytest.fixture(autouse=True)
def _children_find_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(str(bench.__file__)).parents[1])
    paths = [root, str(Path(root) / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.long
def test_saves_are_made_by_processes_of_their_own_and_removed(tmp_path: Path) -> None:
    chosen = ["transposed: sluice.save .safetensors"]
    options = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(save.main, [*options, *(f"--method={name}" for name in chosen)])
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "out" / "save.json").read_text(encoding="utf-8"))["runs"]
    assert list(runs) == chosen
    assert all(run["nbytes"] > 1 << 20 and run["seconds"] > 0 for each in runs.values() for run in each)
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


@pytest.mark.usefixtures("fresh_processes")
def test_a_check_is_compared_with_the_raw_read_of_what_it_reads(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    monkeyed = {name: verify.CASES[name] for name in ("raw .pth",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "CASES", monkeyed)
        patch.setattr(verify, "subprocess", fresh_process.SUBPROCESS)
        done = CliRunner().invoke(verify.main, [*options, "--state", "warm"])
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))["seconds"]
    assert {name: len(runs["warm"]) for name, runs in seconds.items()} == dict.fromkeys(monkeyed, 1)
    lines = verify.table({"raw .pth": {"cold": [1.0, 2.0, 9.0]}, "verify .pth: CRC-32": {"cold": [8.0, 4.0, 1.0]}})
    assert lines[-1] == "| verify .pth: CRC-32 | 4.00 | 1.00 to 8.00 | 0.50 |"


@pytest.mark.parametrize("name", list(verify.CASES))
def test_every_way_to_read_finds_nothing_wrong(checkpoints: dict[Kind, Path], name: str) -> None:
    case = verify.CASES[name]
    case.run([checkpoints[suffix] for suffix in case.files], "warm")
