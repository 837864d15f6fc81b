"""Steps shared by every load: a request is decided without side effects, then run, then reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import sluice
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint, borrow
from sluice.engine.running_plan import RunResult
from sluice.loading.job import Loaded, LoadJob, LoadRequest, decide, load_report, run
from sluice.loading.load import load
from sluice.loading.module_request import EntriesRequest, ModuleRequest
from sluice.loading.optimizer_job import OptimizerRequest
from sluice.loading.state_dict import StateDictRequest
from sluice.reading.transfer import plan_transfer
from sluice.records import Peaks, Request
from support.recorded_reads import record_reads

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


def module_request(options: TransferOptions) -> LoadRequest:
    return ModuleRequest(model=net(), key="model", options=options)


def state_dict_request(options: TransferOptions) -> LoadRequest:
    return StateDictRequest(device="cpu", key="model", options=options)


def optimizer_request(options: TransferOptions) -> LoadRequest:
    return OptimizerRequest(optimizer=torch.optim.AdamW(net().parameters()), options=options)


class RowsRequest(LoadRequest, frozen=True, kw_only=True):
    """A kind of load that the package lacks: some rows of one tensor."""

    name: str
    rows: int

    def job(self, checkpoint: OpenCheckpoint) -> RowsJob:
        entry = replace(checkpoint.entries[self.name], shape=(self.rows, SIZE))
        requests = (Request(name=self.name, entry=entry, dtype=entry.dtype, device="cpu"),)
        prepared = plan_transfer(checkpoint, requests, options=self.options)
        return RowsJob(checkpoint=checkpoint, requests=requests, prepared=prepared, key=self.name)


class RowsJob(LoadJob, frozen=True, kw_only=True):
    def install(self, fetched: tuple[list[torch.Tensor], RunResult]) -> Loaded:
        tensors, result = fetched
        return Loaded(result=result, value=tensors[0])


def rows_request(options: TransferOptions) -> LoadRequest:
    return RowsRequest(name="model.weight", rows=256, options=options)


KINDS = [module_request, state_dict_request, optimizer_request, rows_request]


@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_reads_no_data_and_the_report_has_what_it_predicted(
    kind: Callable[[TransferOptions], LoadRequest], file: Path
) -> None:
    with sluice.open(file) as checkpoint:
        (recording,) = record_reads(checkpoint)
        job = decide(kind(OPTIONS), checkpoint)
        assert recording.read_bytes < 8 * HEADER  # headers of records, no tensor data
        report = load_report(job, run(job, progress=False), seconds=1.0, measured=NO_PEAKS)
    assert report.predicted == job.plan.predicted
    assert (report.tensors, report.read_bytes) == (len(job.plan.targets), job.plan.read_bytes)
    assert {row.name for row in report.table()} == {request.name for request in job.requests}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_limits_and_offers_what_fits(
    kind: Callable[[TransferOptions], LoadRequest], file: Path
) -> None:
    with sluice.open(file) as checkpoint:
        (recording,) = record_reads(checkpoint)
        needed = kind(OPTIONS).job(checkpoint).plan.predicted.total_bytes
        decide(kind(TransferOptions(memory=sluice.MemoryLimits(host=needed))), checkpoint)
        with pytest.raises(sluice.BudgetError) as caught:
            decide(kind(TransferOptions(memory=sluice.MemoryLimits(host=needed - 1))), checkpoint)
        assert recording.read_bytes < 8 * HEADER  # headers of records, no tensor data
    assert all(alternative.needs["host"] < needed for alternative in caught.value.alternatives)


def test_a_kind_of_its_own_loads_as_the_others_do(file: Path) -> None:
    request = rows_request(OPTIONS)
    with sluice.open(file) as checkpoint:
        loaded = run(decide(request, checkpoint), progress=False)
        assert torch.equal(loaded.value, checkpoint["model.weight"][:256].read())
    report = load(request, borrow(file), progress=False)
    assert (report.key, report.final_bytes) == ("model.weight", 256 * SIZE * 4)


def test_entries_fill_a_module_without_a_search(file: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(SIZE, SIZE)
    with sluice.open(file, key="model") as checkpoint:
        request = EntriesRequest(model=model, entries=checkpoint.entries, options=OPTIONS)
        report = load(request, borrow(checkpoint), progress=False)
        assert torch.equal(model.weight, checkpoint["weight"].read())
    assert (report.missing, report.unexpected) == ((), ())
