"""Fresh processes, measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sluice.benchmark import process as _process
from sluice.benchmark.gpt2 import random_state_dict, write_checkpoint
from sluice.benchmark.loads import run_job
from sluice.benchmark.methods import final_bytes
from sluice.benchmark.process import Watcher, run_tasks
from sluice.benchmark.records import BenchTask, Outcome, Work
from support.comparisons import job


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pth"
    write_checkpoint(random_state_dict("tiny", torch.float32), path)
    return path


def test_a_copying_method_grows_by_anonymous_memory(checkpoint: Path) -> None:
    final = final_bytes("tiny", torch.float32)
    outcome = run_job(job("meta-sequential", checkpoint, verify=True))
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert outcome.seconds > 0
    # The total is the kernel's own record. The kinds are sampled; on a busy machine there may be no sample between the
    # last copy and the release of the state dict, but the final sample includes the model.
    assert 1.9 * final < outcome.total_bytes < 3 * final
    assert 0.95 * final < outcome.anon_bytes <= outcome.total_bytes
    assert outcome.file_bytes + outcome.shmem_bytes < 0.5 * final
    assert outcome.verdict is not None


@pytest.mark.usefixtures("forked_processes")
def test_a_mapping_method_grows_by_file_pages_and_claims_no_memory_before_its_time(checkpoint: Path) -> None:
    final = final_bytes("tiny", torch.float32)
    claim_time = time.monotonic() + 0.7
    outcome = run_job(job("mmap", checkpoint), claim_time=claim_time)
    assert (outcome.status, time.monotonic() > claim_time) == ("ok", True)
    assert outcome.file_bytes > 0.9 * final
    assert outcome.anon_bytes < 0.5 * final
    assert outcome.verdict is None


@pytest.mark.usefixtures("forked_processes")
def test_errors_missing_packages_and_lateness_are_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run_job(job("naive", tmp_path / "nowhere.pth"))
    assert failed.status == "failed"
    assert failed.reason.startswith("FileNotFoundError: ")
    assert failed.total_bytes > 0
    (tmp_path / "accelerate.py").write_text("raise ImportError('no accelerate here')")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_job(job("accelerate", tmp_path)) == Outcome(status="absent", reason="no accelerate here")
    os.mkfifo(tmp_path / "endless.pth")
    late = run_job(job("naive", tmp_path / "endless.pth"), timeout_seconds=0.1)
    assert (late.status, late.reason) == ("timeout", "stopped after 0.1 s")


def test_a_killed_process_is_an_outcome(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process._Child, "go_on", lambda child, _: child.process.kill())
    outcome = run_job(job("naive", checkpoint))
    assert (outcome.status, outcome.reason) == ("killed", "killed by the system: out of memory")


def steps(number: int, fails: int, folder: str) -> Work:
    """Keep 64 MiB, and write down every step; fail in one process while it builds."""
    file = Path(folder, "log")

    def note(step: str) -> None:
        with file.open("a") as log:
            log.write(f"{step}\n")

    note("prepared")
    yield
    note("built")
    if number == fails:
        raise RuntimeError("no model")
    yield
    kept = bytearray(os.urandom(1 << 20) * 64)
    note("timed")
    yield
    return {"kept": len(kept)}


def _steps(folder: Path, *, fails: int = -1) -> list[Outcome]:
    work = f"{__name__}:steps"
    tasks = [BenchTask(work=work, arguments={"number": n, "fails": fails, "folder": str(folder)}) for n in range(2)]
    return run_tasks(tasks, timeout_seconds=100)


@pytest.mark.usefixtures("forked_processes")
def test_processes_at_once_do_each_step_together(tmp_path: Path) -> None:
    found = _steps(tmp_path)
    assert [each.facts for each in found] == [{"kept": 64 << 20}] * 2
    assert all(each.total_bytes >= 64 << 20 for each in found)
    assert (tmp_path / "log").read_text().split() == [step for step in ("prepared", "built", "timed") for _ in "ab"]


@pytest.mark.usefixtures("forked_processes")
def test_if_one_process_fails_the_others_do_not_go_on(tmp_path: Path) -> None:
    found = _steps(tmp_path, fails=1)
    assert [(each.status, each.reason) for each in found] == [
        ("killed", "another process of the same task failed"),
        ("failed", "RuntimeError: no model"),
    ]
    assert "timed" not in (tmp_path / "log").read_text()


def test_growth_of_a_process_and_of_a_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "_MOMENTS", 2)
    grow = """
import sys
print("ready", flush=True)
sys.stdin.readline()
kept = b"x" * (64 << 20)
print("grown", flush=True)
sys.stdin.readline()
"""
    used = [100]
    with subprocess.Popen([sys.executable, "-c", grow], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        watcher = Watcher(process.pid, device_used=lambda: used[0])
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        used[0] = 350
        peaks, trace = watcher.stop(exact_peak=False)
        process.kill()
    assert 64 << 20 <= peaks["anon_bytes"] <= peaks["total_bytes"] < 80 << 20
    assert trace.device[-1] == 250
    assert max(trace.anon) == peaks["anon_bytes"]  # a trace that was thinned keeps its peak
    assert trace.seconds[-1] > 0
    assert len(trace.seconds) == len(trace.anon) <= 2
