"""Steps shared by every load: a request is decided without side effects, then run, then reported.

Small loads: the system files that each opens, and that no thread is started.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice._options import TransferOptions
from sluice.loading.job import LoadRequest, decide, load_report, run
from sluice.loading.module_request import ModuleRequest
from sluice.loading.optimizer_job import OptimizerRequest
from sluice.loading.state_dict import StateDictRequest
from sluice.machine import facts, filesystems
from sluice.records import Peaks
from support.range_server import RangeServer, status
from support.sources import record_reads
from support.watching import watch
from support.work import functions_entered

SIZE = 512
HEADER = 16 << 10
OPTIONS = TransferOptions()
NO_PEAKS = Peaks(anon_bytes=0, file_bytes=0, shmem_bytes=0, total_bytes=0)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


Kind = Callable[[TransferOptions], LoadRequest]

KINDS: dict[str, Kind] = {
    "module": lambda options: ModuleRequest(model=net(), key="model", options=options),
    "state dict": lambda options: StateDictRequest(device="cpu", key="model", options=options),
    "optimizer": lambda options: OptimizerRequest(optimizer=torch.optim.AdamW(net().parameters()), options=options),
}


@pytest.mark.parametrize(("place", "value"), [("map", torch.ones(512, 512)), ("copy", torch.ones(0))])
def test_a_load_that_reads_nothing_has_one_event(tmp_path: Path, place: Any, value: torch.Tensor) -> None:
    sluice.save({"0": value}, tmp_path / "f.safetensors")
    model, seen = nn.ParameterList([torch.empty_like(value, device="meta")]), list[sluice.ProgressEvent]()
    sluice.load_into(model, tmp_path / "f.safetensors", place=place, progress=seen.append)
    assert [(event.done_bytes, event.total_bytes) for event in seen] == [(0, 0)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_decision_reads_no_data_and_the_report_has_what_it_predicted(kind: Kind, file: Path) -> None:
    with sluice.open(file) as checkpoint:
        (recording,) = record_reads(checkpoint)
        job = decide(kind(OPTIONS), checkpoint)
        assert recording.read_bytes < 8 * HEADER  # headers of records, no tensor data
        report = load_report(job, run(job, progress=False), seconds=1.0, measured=NO_PEAKS)
    assert report.predicted == job.plan.predicted
    assert (report.tensors, report.read_bytes) == (len(job.plan.targets), job.plan.read_bytes)
    assert {row.name for row in report.table()} == {request.name for request in job.requests}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_keeps_its_limits_and_offers_what_fits(kind: Kind, file: Path) -> None:
    with sluice.open(file) as checkpoint:
        needed = kind(OPTIONS).job(checkpoint).plan.predicted.total_bytes
        decide(kind(TransferOptions(memory=sluice.MemoryLimits(host=needed))), checkpoint)
        with pytest.raises(sluice.BudgetError) as caught:
            decide(kind(TransferOptions(memory=sluice.MemoryLimits(host=needed - 1))), checkpoint)
    assert all(alternative.needs["host"] < needed for alternative in caught.value.alternatives)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("remote") / "model.safetensors"
    sluice.save(layers(), path)
    return path.read_bytes()


@pytest.fixture
def server(content: bytes) -> Iterator[RangeServer]:
    pytest.importorskip("urllib3", reason="urllib3 is not installed: pip install 'sluice[remote]'")
    with RangeServer({"/model.safetensors": content}) as server:
        yield server


def test_the_plan_and_the_report_have_the_requests_of_the_server(server: RangeServer, content: bytes) -> None:
    where = server.url("/model.safetensors")
    plan: Any = sluice.plan(layers(), where)
    assert (plan.remote.header_requests, plan.remote.header_bytes) == (len(server.requests), 65536)
    assert plan.remote.planned_bytes == plan.read_bytes
    assert plan.remote.requests is None
    assert plan.remote.describe() in str(plan).splitlines()
    assert json.loads(json.dumps(plan.to_json()))["remote"]["planned_requests"] == plan.remote.planned_requests
    server.requests.clear()
    remote: Any = sluice.load_into(layers(), where).remote
    assert (remote.header_requests, remote.planned_requests) == (1, plan.remote.planned_requests)
    assert remote.requests == len(server.requests) - 1 == plan.remote.planned_requests
    # The first request has brought the start of the first tensor too.
    assert remote.received_bytes == len(content) - 65536


def test_repeated_requests_count(server: RangeServer) -> None:
    expected: Any = sluice.load_into(layers(), server.url("/model.safetensors")).remote
    server.faults = {len(server.requests) + 1: status(503)}
    report: Any = sluice.load_into(layers(), server.url("/model.safetensors"))
    assert report.remote.requests == expected.requests + 1
    assert report.remote.received_bytes == expected.received_bytes
    assert f"{expected.planned_requests:,} and " in str(report)


def test_local_files_have_no_requests(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert sluice.plan(layers(), path).remote is None
    report = sluice.load_into(layers(), path)
    assert report.remote is None
    assert "remote:" not in str(report)


def test_an_open_checkpoint_counts_what_it_has_read(server: RangeServer) -> None:
    with sluice.open(server.url("/model.safetensors")) as checkpoint:
        checkpoint["3.weight"][:2].read()
        found: Any = sluice.plan(layers(), checkpoint).remote
        assert found.header_requests == 2
        assert torch.equal(sluice.load_state_dict(checkpoint)["3.weight"][:2], checkpoint["3.weight"][:2].read())


def test_a_second_small_load_opens_few_system_files_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "f.pth")
    sluice.load_into(nn.Linear(4, 4), tmp_path / "f.pth")
    opened: list[str] = []
    watch(monkeypatch, os, "open", lambda path, *_: opened.append(str(path)))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    monkeypatch.setattr(filesystems, "_mounted_type", lambda _: pytest.fail("the mounts were searched again"))
    sluice.load_into(nn.Linear(4, 4), tmp_path / "f.pth")
    system = [path for path in opened if path.startswith(("/proc/", "/sys/")) and "/cgroup" not in path]
    expected = ["/proc/self/clear_refs", "/proc/self/status", "/proc/meminfo", "/proc/self/status"]
    assert system == (expected if os.path.exists("/proc/self/clear_refs") else [])
    assert [path for path in opened if path.endswith(".pth")] == [str(tmp_path / "f.pth")]


@pytest.mark.parametrize(("suffix", "files", "functions"), [(".safetensors", 43, 202), (".pth", 54, 293)])
def test_a_second_load_of_eight_tensors_enters_few_functions(
    tmp_path: Path, suffix: str, files: int, functions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bounds are what such a load takes now, with a margin for other versions of Python. They are only lowered.
    monkeypatch.setattr(facts, "_unlimited_until", math.inf)  # on a busy machine this time ends between the loads
    for package in ("peft", "bitsandbytes"):  # if other tests import them, their wrappers and weights are looked for
        monkeypatch.delitem(sys.modules, package, raising=False)
    path = tmp_path / f"f{suffix}"
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    torch.save(model.state_dict(), path) if suffix == ".pth" else save_file(model.state_dict(), path)
    sluice.load_into(model, path)
    gc.collect()  # not within: finalizers of other tests enter functions, too
    with functions_entered(Path(sluice.__file__).parent) as entered:
        sluice.load_into(model, path)
    found = sorted({file for file, _ in entered})
    assert len(found) <= files, found
    assert len(entered) <= functions


def test_a_load_with_readers_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1 << 20, 9, bias=False)  # more than one thread reads if it is cached
    torch.save(model.state_dict(), tmp_path / "f.pth")
    started: list[str] = []
    watch(monkeypatch, threading.Thread, "start", lambda thread: started.append(thread.name))
    sluice.load_into(model, tmp_path / "f.pth")
    assert {"sluice-sampler-0", "sluice-reader-0"} <= set(started)
