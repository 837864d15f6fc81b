"""Steps shared by every load: a request is decided without side effects, then run, then reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice._options import TransferOptions
from sluice.loading.job import LoadRequest, decide, load_report, run
from sluice.loading.module_request import ModuleRequest
from sluice.loading.optimizer_job import OptimizerRequest
from sluice.loading.state_dict import StateDictRequest
from sluice.records import Peaks
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


KINDS = [module_request, state_dict_request, optimizer_request]


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
