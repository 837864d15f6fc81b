"""``bench.remote`` and ``bench.gpu`` without a network and a GPU: runs, their order, deadlines and tables."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from bench import _puzzle as puzzle
from bench import _remote_methods, gpu
from bench._raw_http import Span, spans
from bench._remote_methods import CONTENDERS, RAW
from bench._remote_server import Answer, Link, answer_to, parse_request
from bench.remote import Cell, Run, default_cells, missing, section
from sluice.benchmark import machine as _machine
from sluice.benchmark import runner as _runner
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob, Outcome

_CELL = Cell(kind="pth", dtype="float32", latency=5.0, gbit=10.0)


def _answer(root: Path, target: str, **headers: str) -> Answer:
    lines = [f"GET {target} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return answer_to(parse_request("\r\n".join(lines).encode()), root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a&b").write_bytes(bytes(100))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "begin", "nbytes"),
    [("bytes=10-19", 10, 10), ("bytes=90-", 90, 10), ("bytes=90-200", 90, 10), ("bytes=-5", 95, 5)],
)
def test_ranges(root: Path, asked: str, begin: int, nbytes: int) -> None:
    found = _answer(root, "/bucket/a%26b", Range=asked)
    assert (found.status, found.begin, found.nbytes) == ("206 Partial Content", begin, nbytes)
    assert found.headers["Content-Range"] == f"bytes {begin}-{begin + nbytes - 1}/100"


def test_refused_requests_and_lists(root: Path) -> None:
    assert _answer(root, "/bucket/a%26b", Range="bytes=100-").status.startswith("416")
    assert _answer(root, "/bucket/a%26b", If_Match='"other"').status.startswith("412")
    assert _answer(root, "/bucket/../secret").status.startswith("404")
    assert b"<Key>a&amp;b</Key>" in _answer(root, "/bucket?list-type=2&prefix=a").content
    assert b"<Key>" not in _answer(root, "http://host/bucket/?list-type=2&prefix=x").content


def test_all_connections_share_the_rate() -> None:
    pauses: list[float] = []
    link = Link(1000.0, clock=lambda: 100.0, sleep=pauses.append)
    for _ in range(3):
        link.wait(500)
    assert pauses == pytest.approx([0.498, 0.998, 1.498])


def test_requests_follow_each_other_in_memory() -> None:
    assert spans([("a", 5), ("b", 2)], 4) == [Span("a", 0, 4, 0), Span("a", 4, 1, 4), Span("b", 0, 2, 5)]


def test_peers_run_on_one_network_and_it_comes_first() -> None:
    cells = default_cells(("pth",), ("float32", "bfloat16"), (0.0, 5.0, 50.0), (1.0, 10.0))
    assert cells[0] == (_CELL, tuple(_remote_methods.METHODS))
    assert {cell.dtype for cell, names in cells if RAW in names} == {"float32"}
    assert all(set(names) <= set(CONTENDERS) for cell, names in cells if (cell.gbit, cell.latency) != (10.0, 5.0))
    assert len(cells) == 12


def test_a_later_call_goes_on_and_does_not_repeat_failures() -> None:
    cells = [(_CELL, (RAW, "sluice http", "fsspec file"))]
    done = [
        Run(cell=_CELL, method=RAW, seconds=1.0),
        Run(cell=_CELL, method="fsspec file", problem="killed"),
    ]
    left = [name for _, name in missing(cells, (), done, 2)]
    assert left == ["sluice http", "sluice http", RAW]


def test_the_table_compares_with_the_raw_client_of_the_network() -> None:
    other = Cell(kind="pth", dtype="bfloat16", latency=5.0, gbit=10.0)
    figures = {"seconds": 3.0, "cpu": 1.5, "growth": (10 << 20) + 50, "needed": 100, "finished": 50, "requests": 4}
    raw = Run(cell=_CELL, method=RAW, seconds=2.0)
    ours = msgspec.convert(
        {"cell": msgspec.to_builtins(other), "method": "sluice http", **figures, "received": 101}, Run
    )
    absent = Run(cell=other, method="s3torchconnector", problem="not installed: s3torchconnector")
    assert section([ours, raw]).rows[0][-7:] == ("3.00", "1.50", "10", "1.5", "4", "1.010", "")
    assert section([raw, ours, absent]).rows[-1][-7:] == (*("-",) * 6, "not installed: s3torchconnector")


MIB = 1 << 20
GIB = 1 << 30


def test_every_method_reads_its_checkpoint_raw_limits_come_first_and_ours_is_in_every_table() -> None:
    scenarios = gpu.scenarios_for("tiny", Path("folder"))
    for scenario in scenarios:
        assert scenario.device == "cuda"
        for method, path in scenario.checkpoints.items():
            assert path.suffix in METHODS[method].reads, (scenario.title, method)
    assert list(scenarios[0].checkpoints)[:2] == ["raw-direct", "raw-buffered"]
    assert len({scenario.title for scenario in scenarios}) == len(scenarios)
    assert all(any(method.startswith("sluice") for method in scenario.checkpoints) for scenario in scenarios)


def test_without_a_gpu_the_command_prints_an_error_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.main, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.output == f"bench.gpu needs a CUDA device, and torch {torch.__version__} finds none here.\n"
    assert not (tmp_path / "out").exists()


def job_outcome(job: MethodJob, **_: object) -> Outcome:
    """Return the outcome of a fake process."""
    verdict = job.dtype if job.verify else None
    final = 100 * MIB if job.dtype == "float32" else 50 * MIB
    return Outcome(status="ok", seconds=0.5, total_bytes=90 * MIB, device_reserved_bytes=final + MIB, verdict=verdict)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the command with a fake device and returns its output, from outcomes of tasks."""
    # Enough disk space for the whole puzzle, regardless of this machine.
    usage = SimpleNamespace(free=100 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def run(tasks: dict[str, Outcome], *, run_job: Any = job_outcome, code: int = 0) -> str:
        (tmp_path / "disk").mkdir()
        monkeypatch.setattr(_runner, "run_job", run_job)
        monkeypatch.setattr(_runner, "absence", lambda method: "no kit" if method == "instanttensor" else "")
        for state in list(_runner._PREPARATIONS):
            monkeypatch.setitem(_runner._PREPARATIONS, state, bool)
        monkeypatch.setattr(gpu, "write_checkpoint", lambda _, path: path.mkdir() if not path.suffix else path.touch())
        monkeypatch.setattr(gpu, "make_cold", lambda _: True)
        monkeypatch.setattr(puzzle, "make_file", lambda path, *_, **__: path.touch())
        monkeypatch.setattr(gpu, "run_alone", lambda work, *_, **__: tasks[work])
        monkeypatch.setattr(_machine, "device", lambda: "cpu")
        for name, value in (("is_available", True), ("mem_get_info", (100 * GIB, 140 * GIB))):
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        folders = ["--directory", str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(gpu.main, ["--size", "tiny", *folders])
        assert done.exit_code == code, done.output
        return done.output

    return run


PINNED, PUZZLE = "bench.gpu:pinned_copy", "bench._puzzle:solve"
DONE = {
    PINNED: Outcome(status="ok", facts={"seconds": 1.0}),
    PUZZLE: Outcome(
        status="ok",
        seconds=20.0,
        total_bytes=100 * MIB,
        facts={
            "read_bytes": 40 * 10**9,
            "device_allocated_bytes": 20 * 10**9,
            "device_reserved_bytes": 20 * 10**9,
            "wrong_matrices": 0,
            "computes": True,
        },
    ),
}


def _tables(path: Path) -> list[list[list[str]]]:
    return [section["rows"] for section in json.loads(path.read_text())["sections"]]


def test_the_command_leaves_tables_and_no_checkpoints(invoke: Any, tmp_path: Path) -> None:
    invoke(DONE)
    assert list((tmp_path / "disk").iterdir()) == []
    document = json.loads((tmp_path / "out/gpu.json").read_text())
    assert document["command"] == "python3 -m bench.gpu --size tiny --minutes 7.5"
    assert len(document["scenarios"]) == 5
    limits, solved = _tables(tmp_path / "out/gpu.json")
    assert limits[0] == ["copy from page-locked memory", "1.000", "0.03"]
    assert ["scale", "1.00 of the full puzzle"] in solved
    assert ["wrong matrices", "0"] in solved
    markdown = (tmp_path / "out/gpu.md").read_text()
    assert "| naive |" in markdown
    assert "| instanttensor | - |" in markdown  # with the reason below
    assert "- instanttensor: no kit" in markdown
    assert "<h1>GPT-2 tiny" in (tmp_path / "out/gpu.html").read_text()


def test_failures_are_reported_and_do_not_stop_the_rest(invoke: Any, tmp_path: Path) -> None:
    failed = Outcome(status="failed", reason="no page-locked memory")
    invoke({PINNED: failed, PUZZLE: Outcome(status="killed", reason="killed")})
    limits, solved = _tables(tmp_path / "out/gpu.json")
    assert limits[0][1] == "no page-locked memory"
    assert solved[-1] == ["result", "killed"]


def test_wrong_weights_fail_the_command(invoke: Any) -> None:
    def lie(job: MethodJob, **_: object) -> Outcome:
        outcome = job_outcome(job)
        return dataclasses.replace(outcome, verdict="other") if job.method == "naive" and job.verify else outcome

    assert "wrong weights: naive" in invoke(DONE, run_job=lie, code=1)


def test_too_little_time_for_the_puzzle_is_reported(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puzzle, "_EXTRA_SECONDS", 1000.0)
    invoke(DONE)
    assert _tables(tmp_path / "out/gpu.json")[1][-1][1].startswith("not tried: disk, device or the ")
