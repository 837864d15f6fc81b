"""The commands of bench/ at small sizes: what they print and write, and when a goal counts as reached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import construction, index, merge, ranks, refresh, shared, small, startup


@pytest.mark.long
@pytest.mark.parametrize(
    ("bench", "arguments", "shown"),
    [
        (
            index,
            "--tensors 200 --shards 3 --runs 1",
            ("torch.save, zip", "save, legacy", "safetensors", "3 shards"),
        ),
        (small, "--runs 2 --clock processor --size 20 0.01", ("20 tensors, 0.01 MB, .pth", "0.01 MB, .safetensors")),
        (
            startup,
            "--runs 1",
            ("load_into, .pth", ".safetensors", "load_state_dict", "empty_init", "inspect, wall"),
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_commands_with_a_goal(bench: Any, arguments: str, shown: tuple[str, ...]) -> None:
    done = CliRunner().invoke(bench.main, arguments.split())
    assert done.exit_code in {0, 1}, done.output  # one run of a small size says nothing about the goal
    assert [what for what in shown if what not in done.output] == []


def test_constructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "find_spec", lambda _: None)  # transformers takes seconds to import
    done = CliRunner().invoke(construction.main, ["--runs", "1", "--size", "small"])
    assert done.exit_code in {0, 1}, done.output
    assert "GPT-2 small" in done.output


@pytest.mark.long
def test_a_refresh(tmp_path: Path) -> None:
    done = CliRunner().invoke(refresh.main, ["--runs", "1", "--megabytes", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "sluice.refresh, 11 %" in done.output


@pytest.mark.long
def test_shared_copies_leave_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(shared.main, ["--size=tiny", "--runs=2", "--processes=2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert not any("sluice-bench" in path.name for path in Path("/dev/shm").iterdir())


def test_merges_are_compared(tmp_path: Path) -> None:
    options = ["--size=tiny", "--runs=1", f"--out={tmp_path / 'out'}", "--inputs=2", "--method=swa"]
    done = CliRunner().invoke(merge.main, options)
    assert done.exit_code == 0, done.output
    assert list(json.loads((tmp_path / "out/merge.json").read_text())["seconds"]) == ["swa, sluice", "swa, torch"]


@pytest.mark.long
def test_ranks_finish_with_the_same_weights_by_every_method(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    command = ["--size", "tiny", "--ranks", "2", "--runs", "1", "--file", "shards", "--dtype", "float32"]
    folders = ["--directory", str(tmp_path / "files"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(ranks.main, [*command, *folders])
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "out/ranks.json").read_text())["cells"]
    assert {cell["method"] for cell in cells} == {"sluice", "set_model_state_dict", "accelerate", "torch DCP"}
    assert [cell["problem"] for cell in cells] == [""] * len(cells)
    assert all(len(cell["growth"]) == 2 for cell in cells)


def test_a_cell_of_ranks_without_a_result_says_why() -> None:
    cell = ranks.Cell(method="sluice", file="pth", ranks=2, dtype="float32", cold=True, problem="killed")
    assert ranks.section([cell]).rows == (("sluice", "pth", "float32", "2", "cold", *("-",) * 5, "killed"),)


def test_when_a_goal_is_kept() -> None:
    row = index.Row(what="a file", ours=1.0, theirs=3.0, reference="a library", goal=1 / 3)
    others = (replace(row, ours=1.1), replace(row, tensor_bytes=1024), replace(row, tensor_bytes=1025))
    assert [each.kept for each in (row, *others)] == [True, False, True, False]
    file = small.Row(what="a file", megabytes=1.0, ours=(1.2, 1.1), others={"one": 1.0, "other": 2.0})
    large = replace(file, megabytes=50.0)
    slower = (replace(file, ours=(1.3, 0.5)), replace(file, ours=(0.5, 1.3)), large, replace(large, ours=(0.9, 0.8)))
    assert [each.kept for each in (file, *slower)] == [True, False, False, False, True]
