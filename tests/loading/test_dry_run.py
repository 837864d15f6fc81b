"""``sluice.plan``: decisions of a load without the load, compared with the usual ways to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.reading import transfer
from sluice.records import DeviceFacts, LoadPlan
from support.fake_accelerator import FakeAccelerator
from support.trained_net import empty, unchanged
from support.watching import watch

MIB = 1 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, 512)  # 4 MiB
        self.up = nn.Linear(512, 2048)  # 4 MiB
        self.head = nn.Linear(512, 2048, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(512))
        self.register_buffer("table", torch.ones(64, 1024), persistent=False)  # 256 KiB


FINAL = 4 * (2048 * 512 * 2 + 2048 + 512)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "net.pth"
    torch.save(Net().state_dict(), path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"place": "map"},
        {"memory": sluice.MemoryLimits(staging="1MiB")},
        {"page_cache": "bypass"},
        {"rename": {"up.weight": "renamed"}, "strict": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_the_load_follows_the_plan(
    file: Path, options: dict[str, Any], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net() if live else empty(Net)
    with unchanged(model):
        planned = sluice.plan(model, file, **options)
    executed: list[LoadPlan] = []
    watch(monkeypatch, transfer, "run", lambda _, prepared, *__, **___: executed.append(prepared.plan))
    report = sluice.load_into(model, file, **options)
    made = executed[-1]
    assert planned.predicted == made.predicted == report.predicted
    assert (planned.read_bytes, planned.mapped_bytes) == (report.read_bytes, report.mapped_bytes)
    assert planned.final_bytes == report.final_bytes
    assert (planned.missing, planned.unexpected, planned.tied) == (report.missing, report.unexpected, report.tied)
    assert (planned.cast, planned.initialised, planned.key) == (report.cast, report.initialised, report.key)


def test_a_load_that_does_not_fit_lists_alternatives_without_an_error(file: Path) -> None:
    memory = sluice.MemoryLimits(host="22MiB", staging="1MiB")
    report = sluice.plan(empty(Net), file, memory=memory)
    assert not report.fits
    assert "for weights" in report.shortages[0]
    assert "at most 22.0 MiB (MemoryLimits(host=...))" in report.shortages[0]
    assert {each.change for each in report.alternatives} == {"place='map'", "dtype=torch.bfloat16"}
    with pytest.raises(sluice.BudgetError) as caught:
        sluice.load_into(empty(Net), file, memory=memory)
    assert caught.value.alternatives == report.alternatives
    assert sluice.plan(empty(Net), file, memory=memory, dtype=torch.bfloat16).fits


def test_methods_are_compared_from_before_the_model_exists(file: Path) -> None:
    report = sluice.plan(empty(Net), file)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["fits"], data["methods"][0]["method"]) == (True, "naive")
    by_name = {each.method: each for each in report.methods}
    table = 64 * 1024 * 4
    assert by_name["naive"].host.total_bytes == 2 * FINAL + table + 16 * MIB
    assert by_name["mmap"].host.file_bytes == FINAL
    assert by_name["per-parameter"].needs == "needs one file for each parameter"
    own = by_name["sluice"].host.total_bytes
    live = {each.method: each for each in sluice.plan(Net(), file).methods}["sluice"].host.total_bytes
    assert own - MIB <= live <= own + MIB  # the model exists already: only the additional memory differs


def test_without_a_model_the_checkpoint_is_enough(file: Path) -> None:
    report = sluice.plan(None, file, dtype=torch.bfloat16)
    assert report.final_bytes == FINAL // 2
    assert report.recommended == "sluice"
    assert "taken to be those of the checkpoint" in report.notes[0]


def test_other_tensors_of_the_file_count_for_those_who_load_all_of_it(tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict(), "state": {"moments": torch.zeros(4 * MIB)}}, tmp_path / "f.pth")
    torch.save(Net().state_dict(), tmp_path / "small.pth")
    one, other = ({m.method: m for m in sluice.plan(empty(Net), tmp_path / n).methods} for n in ("f.pth", "small.pth"))
    grown = {name: one[name].host.total_bytes - other[name].host.total_bytes for name in ("meta-sequential", "mmap")}
    assert grown == {"meta-sequential": 16 * MIB, "mmap": 0}


def test_accelerators_have_predictions_and_limits_of_their_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"fake:0": DeviceFacts(device="fake:0", free_bytes=6 * MIB, cached_bytes=0)}
    monkeypatch.setattr("sluice.loading.devices.device_name", str)
    monkeypatch.setattr("sluice.loading.state_dict.device_name", str)
    monkeypatch.setattr("sluice.loading.devices.accelerators", lambda: ("fake:0",))
    for module in ("reading.transfer", "loading.devices"):
        monkeypatch.setattr(f"sluice.{module}.device_facts", free.__getitem__)
    monkeypatch.setattr("sluice.engine.targets.accelerator", lambda _: FakeAccelerator())
    report = sluice.plan(empty(Net), file, device="fake:0")
    assert report.device_bytes["fake:0"] >= FINAL
    assert {limit.where for limit in report.limits} >= {"host", "fake:0"}
    assert any("memory of fake:0" in each for each in report.shortages)
    assert any("device='cpu'" in each.change for each in report.alternatives)
    naive = report.methods[0]
    assert naive.devices["fake:0"] >= 2 * FINAL
    assert not naive.fits
    assert "fake:0" in str(report)
