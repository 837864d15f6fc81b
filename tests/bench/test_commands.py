"""The commands of bench/: the loads that they run, what they print and write, and when a goal counts as reached."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import _stream_nested, construction, index, load, merge, ranks, refresh, save, shared, small, startup, stream
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.records import Outcome
from sluice.measuring import memory_limit_refusal
from support.comparisons import FakeRunner


def run(bench: Any, *arguments: object, codes: tuple[int, ...] = (0,)) -> str:
    """Return the output of ``python -m bench.NAME``."""
    done = CliRunner().invoke(bench.main, list(map(str, arguments)))
    assert done.exit_code in codes, done.output
    return done.output


def _terminate_inside(parent: Path) -> None:
    with temporary_folder(parent) as folder:
        (folder / "large").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def test_the_folder_is_removed_when_its_process_is_terminated(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        _terminate_inside(tmp_path / "new")
    assert ended.value.code == 143
    assert list((tmp_path / "new").iterdir()) == []


def test_load_runs_what_was_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(load, "run_with_progress", runner)
    monkeypatch.setattr(load, "_PACKAGES", ("torch", "no-such-loader"))
    arguments: list[str] = ["--size", "tiny", "--runs", "1", "--case", "pth-bf16", "--case", "safetensors-fp32"]
    arguments += ["--method", "torch-load", "--method", "raw-direct", "--method", "sluice-map"]
    folders: list[str | Path] = ["--directory", tmp_path / "files", "--out", tmp_path / "out"]
    run(load, *arguments, *folders)
    assert [(s.dtype, s.states, list(s.checkpoints)) for s in runner.scenarios] == [
        ("bfloat16", ("cold", "warm"), ["raw-direct", "torch-load", "sluice-map"]),
        ("float32", ("cold", "warm"), ["raw-direct", "sluice-map"]),
    ]
    assert runner.files == {"tiny.pth", "tiny.safetensors"}
    document = json.loads((tmp_path / "out/load.json").read_text())
    assert document["command"] == " ".join(["python -m bench.load", *arguments])
    assert "no-such-loader absent" in (tmp_path / "out/load.md").read_text()
    before = (tmp_path / "files/tiny.pth").stat().st_mtime_ns
    run(load, *arguments, *folders)
    assert (tmp_path / "files/tiny.pth").stat().st_mtime_ns == before  # reused, not written again


@pytest.mark.parametrize(("balloons", "seconds"), [(("bind", "virtio0"), 3.0), (("bind",), 0.0), (None, 0.0)])
def test_only_a_machine_with_a_balloon_waits(
    balloons: tuple[str, ...] | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_BALLOONS", tmp_path / "virtio_balloon")
    for name in balloons or ():
        (tmp_path / "virtio_balloon" / name).mkdir(parents=True)
    assert load._settling_seconds() == seconds


@pytest.mark.long
@pytest.mark.parametrize(
    ("bench", "arguments", "shown"),
    [
        (index, "--tensors 200 --shards 3 --runs 1", ("torch.save, zip", "save, legacy", "safetensors", "3 shards")),
        (small, "--runs 2 --clock processor --size 20 0.01", ("20 tensors, 0.01 MB, .pth", "0.01 MB, .safetensors")),
        (startup, "--runs 1", ("load_into, .pth", ".safetensors", "load_state_dict", "empty_init", "inspect, wall")),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_commands_with_a_goal(bench: Any, arguments: str, shown: tuple[str, ...]) -> None:
    done = run(bench, *arguments.split(), codes=(0, 1))  # one run of a small size says nothing about the goal
    assert [what for what in shown if what not in done] == []


def test_constructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "find_spec", lambda _: None)  # transformers takes seconds to import
    assert "GPT-2 small" in run(construction, "--runs", "1", "--size", "small", codes=(0, 1))


@pytest.mark.long
def test_a_refresh(tmp_path: Path) -> None:
    assert "sluice.refresh, 11 %" in run(refresh, "--runs", "1", "--megabytes", "1", "--out", tmp_path)


@pytest.mark.long
def test_shared_copies_leave_nothing(tmp_path: Path) -> None:
    run(shared, "--size=tiny", "--runs=2", "--processes=2", "--out", str(tmp_path))
    assert not any("sluice-bench" in path.name for path in Path("/dev/shm").iterdir())


def test_merges_are_compared(tmp_path: Path) -> None:
    options = ["--size=tiny", "--runs=1", f"--out={tmp_path / 'out'}", "--inputs=2", "--method=swa"]
    run(merge, *options)
    assert list(json.loads((tmp_path / "out/merge.json").read_text())["seconds"]) == ["swa, sluice", "swa, torch"]


@pytest.mark.long
def test_ranks_finish_with_the_same_weights_by_every_method(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    command = ["--size", "tiny", "--ranks", "2", "--runs", "1", "--file", "shards", "--dtype", "float32"]
    folders = ["--directory", str(tmp_path / "files"), "--out", str(tmp_path / "out")]
    run(ranks, *command, *folders)
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


@pytest.mark.long
def test_saves_are_made_by_processes_of_their_own_and_removed(tmp_path: Path) -> None:
    chosen = ["transposed: sluice.save .safetensors", "2 ranks: sluice.save, DCP"]
    options = ["--size", "tiny", "--runs", "1", "--directory", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    run(save, *options, *(f"--method={name}" for name in chosen))
    seconds = json.loads((tmp_path / "out" / "save.json").read_text(encoding="utf-8"))["seconds"]
    assert list(seconds) == chosen
    assert all(each > 0 for runs in seconds.values() for each in runs)
    assert list((tmp_path / "in").iterdir()) == []
    table = (tmp_path / "out" / "save.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in table for name in chosen)


def test_a_save_that_misses_its_goal_is_named() -> None:
    times = {save.RAW: (1.0, 1.0, 9.0), "sluice.save .pth": (1.0, 1.15, 9.0), "sluice.save .safetensors": (1.06,)}
    done = {
        name: [Outcome(status="ok", seconds=each, facts={"nbytes": 10}) for each in seconds]
        for name, seconds in {**times, "torch.save": (9.0,)}.items()
    }
    assert save.failed(done) == ["sluice.save .safetensors"]
    assert [row[5:7] for row in save.section(done).rows] == [
        ("1.00", "-"), ("1.15", "1.15"), ("1.06", "1.05"), ("9.00", "-")
    ]  # fmt: skip
    del done[save.RAW]
    assert save.failed(done) == []


def test_every_way_to_save_writes_the_weights(tmp_path: Path) -> None:
    state = dict(random_state_dict("tiny", torch.float32))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    for name, method in save.METHODS.items():
        path = tmp_path / f"f{method.suffix}"
        try:
            method.save(state, path)
        except OSError:
            assert name == save.RAW  # no direct I/O on this file system
            continue
        expected = nbytes // 2 if "bf16" in name else nbytes
        assert expected <= save.written_bytes(path) < expected + (1 << 20), name
        save.remove(path)


def _run(seconds: float, read: float) -> Outcome:
    calls = [{"seconds": 99.0, "read": 0}, {"seconds": seconds, "read": read}]  # the first one is not counted
    return Outcome(status="ok", group_bytes=1 << 20, facts={"calls": calls, "logits": "x"})


def test_a_ratio_is_to_the_longer_of_reading_and_computing() -> None:
    loaded = [_run(0.5, 0)]
    rows = [stream.row("a", [_run(2.0, read)], loaded, 2e9) for read in (4e9, 0)]
    assert [row[2] for row in rows] == ["1.00", "4.00"]
    assert rows[0][-2:] == ("1.00 MiB", "yes")
    killed = Outcome(status="killed", reason="out of memory")
    assert stream.row("a", [killed], loaded, 2e9) == ("a", "-", "-", "-", "-", "out of memory")


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--train"]])
def test_the_command_on_a_small_model(tmp_path: Path, more: list[str]) -> None:
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    options = ["--size", "small", "--share", "50", "--runs", "1", "--method", "sluice", "--method", "mmap", *more]
    run(stream, *options, "--directory", str(tmp_path / "in"), "--out", str(tmp_path))
    assert (tmp_path / "stream.md").read_text().count("| yes |") == 2


@pytest.mark.long
@pytest.mark.parametrize(("more", "count"), [("--models", 3), ("--generate", 2)])
def test_the_tables_of_nested_models_and_of_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, count: int
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    monkeypatch.setattr("bench._stream_nested.NESTED", {"Swin": _stream_nested.NESTED["Swin"]})
    monkeypatch.setattr("bench._stream_generation.BATCHES", (1, 2))
    run(stream, more, "--size", "small", "--share", "50", "--out", str(tmp_path))
    assert (tmp_path / "stream.md").read_text().count("| yes |") == count
