"""``sluice diff``: output and exit codes in scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import sluice
from sluice.cli import main


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    state = {"w": torch.arange(5.0), "n\x1b[31m": torch.tensor([1.0])}
    sluice.save(state, tmp_path / "a.pt")
    sluice.save(state, tmp_path / "b.safetensors")
    return tmp_path / "a.pt", tmp_path / "b.safetensors"


def test_0_when_they_are_the_same(paths: tuple[Path, Path]) -> None:
    done = run(*paths)
    assert done.exit_code == 0
    assert done.stdout.startswith("compared 2 of 2 tensors of a with 2 of 2 tensors of b\n")
    assert "2 common names" in done.stdout
    assert done.stdout.rstrip().endswith("the same")
    assert run(*paths, "--quiet").stdout == ""
    assert json.loads(run(*paths, "--json").stdout)["same"] is True


def test_1_when_they_differ(paths: tuple[Path, Path], tmp_path: Path) -> None:
    sluice.save({"w": torch.arange(5.0) + 0.25, "x": torch.tensor([float("inf")])}, tmp_path / "c.pt")
    done = run(paths[0], tmp_path / "c.pt")
    assert done.exit_code == 1
    assert "5 of 5" in done.stdout
    assert "only in a" in done.stdout
    assert "similar" not in done.stdout  # 'n\x1b[31m' and 'x'
    assert "n\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout
    assert "3 tensors differ" in done.stdout
    found = json.loads(run(paths[0], tmp_path / "c.pt", "--json").stdout)["differences"]
    assert {one["name"]: one["kinds"] for one in found} == {
        "w": ["values"],
        "n\x1b[31m": ["only_a"],
        "x": ["only_b"],
    }
    sluice.save({"w": torch.arange(5.0) + 0.25, "n\x1b[31m": torch.tensor([1.0])}, tmp_path / "d.pt")
    assert run(paths[0], tmp_path / "d.pt", "--atol", "0.25", "--quiet").exit_code == 0
    assert run(paths[0], tmp_path / "d.pt", "--atol", "0.2", "--quiet").exit_code == 1


def test_infinite_distances_are_json_too(tmp_path: Path) -> None:
    sluice.save({"x": torch.tensor([1.0])}, tmp_path / "a.pt")
    sluice.save({"x": torch.tensor([float("inf")])}, tmp_path / "b.pt")
    text = run(tmp_path / "a.pt", tmp_path / "b.pt", "--json").stdout

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(text, parse_constant=refuse)["differences"][0]["max_abs"] == "inf"


def test_2_when_there_is_no_answer(paths: tuple[Path, Path], tmp_path: Path) -> None:
    missing = run(paths[0], tmp_path / "nowhere")
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    (tmp_path / "damaged.pt").write_bytes(paths[0].read_bytes()[:-30])
    assert run(paths[0], tmp_path / "damaged.pt").exit_code == 2
    assert run(paths[0], paths[1], "--rtol", "-1").exit_code == 2
    assert run(paths[0]).exit_code == 2
    assert run(*paths, "--key-a", "nothing").exit_code == 2


def test_parts(paths: tuple[Path, Path], tmp_path: Path) -> None:
    torch.save({"model": torch.load(paths[0], weights_only=True), "epoch": 1}, tmp_path / "run.pt")
    assert run(tmp_path / "run.pt", paths[1], "--key-a", "model").exit_code == 0
    assert run(paths[1], tmp_path / "run.pt", "--key-b", "model").exit_code == 0
    assert run(tmp_path / "run.pt", paths[1], "--key", "model").exit_code == 0
    assert run(paths[1], tmp_path / "run.pt", "--key-b", "").exit_code == 1


def test_the_option_that_chooses_a_part_is_named(paths: tuple[Path, Path], tmp_path: Path) -> None:
    state = torch.load(paths[0], weights_only=True)
    torch.save({"model": state, "my ema": dict(state)}, tmp_path / "two.pt")
    done = run(paths[1], tmp_path / "two.pt")
    assert done.exit_code == 2
    assert "other_key='model' (--key-b model): 2 tensors" in done.stderr
    assert "other_key='my ema' (--key-b 'my ema'): 2 tensors" in done.stderr
    assert "key='model' (--key-a model): 2 tensors" in run(tmp_path / "two.pt", paths[1]).stderr


def test_a_patch_is_written_once(paths: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(*paths, "--patch", tmp_path / "step_2.safetensors", "--sparse")
    assert done.exit_code == 0, done.output
    assert sluice.diff(sluice.Patched(paths[0], tmp_path / "step_2.safetensors"), paths[1]).same
    again = run(*paths, "--patch", tmp_path / "step_2.safetensors", "--sparse")
    assert again.exit_code == 2
    assert "already exists" in again.output
    assert run(*paths, "--sparse").exit_code == 2
