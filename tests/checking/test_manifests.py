"""Live weights are verified against a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900))
    model[0].weight = nn.Parameter(torch.rand(700, 900).t())
    sluice.save(model, tmp_path / "m.safetensors", manifest=tmp_path / "m.json")
    return model


def test_what_was_saved_is_in_memory(tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.checking.manifests.SAVE_STAGING_BYTES", 5_000)  # several pieces of each weight
    events: list[sluice.ProgressEvent] = []
    report = sluice.verify(model=model, manifest=tmp_path / "m.json", progress=events.append)
    assert report.ok
    assert events[0].done_bytes < events[-1].done_bytes == events[-1].total_bytes == report.nbytes
    assert (report.tensors, report.format) == (7, "live weights")
    with torch.no_grad():
        model.get_parameter("0.weight")[3, 7] += 1
    [problem] = sluice.verify(model=model, manifest=tmp_path / "m.json").problems
    assert (problem.kind, problem.tensor) == ("hash", "0.weight")
    kinds = {each.kind for each in sluice.verify(model=model.half(), manifest=tmp_path / "m.json").problems}
    assert kinds == {"dtype"}


def test_all_kinds_of_tensors_are_hashed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    model[2].weight = model[1].weight  # tied
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    model.register_buffer("conjugated", torch.tensor([1 + 2j]).conj())
    sluice.save(model, tmp_path / "m.pth", manifest=tmp_path / "m.json")
    assert sluice.verify(model=model, manifest=tmp_path / "m.json").ok
    model.get_buffer("0.num_batches_tracked").add_(1)
    with torch.no_grad():
        model.get_parameter("1.weight")[3, 3] += 1
    problems = sluice.verify(model=model, manifest=tmp_path / "m.json").problems
    assert [each.tensor for each in problems] == ["0.num_batches_tracked", "1.weight", "2.weight"]


def test_what_has_no_values_is_refused(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(sluice.UnsupportedError, match="meta"):
        sluice.verify(model=model.to("meta"), manifest=tmp_path / "m.json")
    with pytest.raises(sluice.UnsupportedError, match="UninitializedParameter"):
        sluice.verify(model=nn.LazyLinear(3), manifest=tmp_path / "m.json")
    with pytest.raises(TypeError, match="manifest"):
        sluice.verify(model=model)
    with pytest.raises(TypeError, match="needs a checkpoint"):
        sluice.verify()
    options: list[dict[str, Any]] = [{"nan": True}, {"hashes": "sha256"}, {"encoding": "latin1"}]
    for each in options:
        with pytest.raises(TypeError, match="takes no source, hashes, nan or encoding"):
            sluice.verify(model=model, manifest=tmp_path / "m.json", **each)
    with pytest.raises(TypeError, match=r"model is a str, not a torch\.nn\.Module"):
        sluice.verify(model="m.pth", manifest=tmp_path / "m.json")  # type: ignore[arg-type]


def test_the_model_may_be_a_part_of_what_was_hashed(tmp_path: Path, model: nn.Module) -> None:
    manifest = tmp_path / "run.json"
    sluice.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "run.pth", manifest=manifest)
    chosen = sluice.verify(model=model, manifest=manifest)
    assert chosen.ok
    assert chosen.key == "model"
    assert sluice.verify(model=model, manifest=manifest, key="model").ok
    with pytest.raises(sluice.MismatchError, match="no tensor in 'ema'"):
        sluice.verify(model=model, manifest=manifest, key="ema")
