"""Resuming from checkpoints of training loops: single files, directories of Trainer and accelerate, DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sluice
from sluice import BudgetError, LimitError, MismatchError, ReadError
from support.distributed import save as save_distributed
from support.sources import RecordingSource, record_reads
from support.trained_net import empty
from support.training_runs import KINDS, differences, net, stopped, train

kind = KINDS["AdamW"]


def test_the_recipe_for_a_scheduler_mixed_precision_and_random_numbers(tmp_path: Path) -> None:
    model = net()
    optimizer = kind(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        train(model, optimizer, 1, first=step)
        scheduler.step()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4096.0, "_growth_tracker": 1})
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "rng": torch.get_rng_state(), "step": 4}, tmp_path / "run.pt")
    expected = torch.rand(3)
    again = empty(net)
    again.frozen.requires_grad_(False)
    with sluice.open(tmp_path / "run.pt") as checkpoint:
        sluice.load_into(again, checkpoint)
        ours = kind(again)
        ours_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(ours, 40)
        ours_scaler = torch.amp.GradScaler("cpu")
        sluice.load_optimizer(ours, checkpoint)
        tree = checkpoint.tree
        ours_scheduler.load_state_dict(tree["scheduler"])
        ours_scaler.load_state_dict(tree["scaler"])
        torch.set_rng_state(tree["rng"].read())
        assert tree["step"] == 4
    assert torch.equal(torch.rand(3), expected)
    assert ours_scaler.state_dict() == scaler.state_dict()
    assert ours_scheduler.state_dict() == scheduler.state_dict()
    assert not differences(ours.state_dict(), optimizer.state_dict())
    assert not differences(again.state_dict(), model.state_dict())


def test_one_open_checkpoint_is_indexed_once_and_read_once(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", kind)
    model = net(seed=1)
    with sluice.open(tmp_path / "run.pt") as checkpoint:
        (recording,) = record_reads(checkpoint)
        first = sluice.load_into(model, checkpoint)
        optimizer = kind(model)
        second = sluice.load_optimizer(optimizer, checkpoint)
        locating = [read for read in recording.reads if read.nbytes < 64]  # local headers of the records
    # Only the data and the local headers of its records: open() has read the directory and the pickle.
    records = first.tensors + second.tensors
    assert recording.read_bytes <= first.read_bytes + second.read_bytes + records * 1024
    assert len(locating) <= records
    offsets = [read.offset for read in recording.reads if read.nbytes >= 64]
    assert len(offsets) == len(set(offsets))


def test_a_failed_read_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", kind)
    model = net()
    optimizer = kind(model)
    train(model, optimizer, 2)
    before = {name: id(tensor) for state in optimizer.state.values() for name, tensor in state.items()}
    text = repr(optimizer.state_dict())
    for at in range(1, 40):
        with sluice.open(tmp_path / "run.pt") as checkpoint:
            files = checkpoint.open_files
            source = RecordingSource(files[0].source, fails_at=at)
            checkpoint.open_files = (replace(files[0], source=source),)
            try:
                sluice.load_optimizer(optimizer, checkpoint)
            except ReadError:
                assert repr(optimizer.state_dict()) == text
                assert before == {name: id(t) for state in optimizer.state.values() for name, t in state.items()}
            else:
                break
    assert at > 1
    assert len(source.reads) < at


def hugging_face(directory: Path, optimizer_name: str) -> torch.optim.Optimizer:
    directory.mkdir()
    model, optimizer = stopped(directory.with_suffix(".pt"), kind)
    safetensors.torch.save_file(dict(model.state_dict()), directory / "model.safetensors")
    torch.save(optimizer.state_dict(), directory / optimizer_name)
    torch.save({"last_epoch": 3}, directory / "scheduler.pt")
    return optimizer


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_directory_of_trainer_or_accelerate(tmp_path: Path, name: str, opened: bool) -> None:
    optimizer = hugging_face(tmp_path / "checkpoint-5", name)
    model = net(seed=1)
    ours = kind(model)
    if opened:
        with sluice.open(tmp_path / "checkpoint-5") as checkpoint:
            sluice.load_into(model, checkpoint)
            report = sluice.load_optimizer(ours, checkpoint)
    else:
        report = sluice.load_optimizer(ours, tmp_path / "checkpoint-5")
    assert report.source == str(tmp_path / "checkpoint-5" / name)
    assert not differences(ours.state_dict(), optimizer.state_dict())
    (tmp_path / "checkpoint-5" / name).unlink()
    with pytest.raises(MismatchError, match="no optimizer state"):
        sluice.load_optimizer(ours, tmp_path / "checkpoint-5")


def test_accelerates_sharded_state_of_fsdp(tmp_path: Path) -> None:
    model, optimizer = stopped(tmp_path / "run.pt", kind)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    (tmp_path / "d").mkdir()
    save_distributed(tmp_path / "d" / "pytorch_model_fsdp_0", {"model": model.state_dict()})
    save_distributed(tmp_path / "d" / "optimizer_0", state)
    again = net(seed=1)
    ours = kind(again)
    report = sluice.load_optimizer(ours, tmp_path / "d", model=again)
    assert (report.key, report.format) == ("optimizer", "torch-distributed")
    assert not differences(ours.state_dict(), optimizer.state_dict())


def test_limits_that_cannot_be_kept(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", kind)
    optimizer = kind(net())
    with pytest.raises(BudgetError):
        sluice.load_optimizer(optimizer, tmp_path / "run.pt", memory=sluice.MemoryLimits(host=1))
    assert not optimizer.state
    with pytest.raises(LimitError):
        sluice.load_optimizer(optimizer, tmp_path / "run.pt", limits=sluice.Limits(entries=3))


def test_the_report_and_progress(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", kind)
    seen: list[float] = []
    report = sluice.load_optimizer(
        kind(net(dtype=torch.bfloat16)), tmp_path / "run.pt", progress=lambda event: seen.append(event.fraction)
    )
    assert seen[-1] == 1.0
    assert report.cast == {"float32->bfloat16": 8}
    assert "key 'optimizer'" in str(report)
    rows = {row.name: row for row in report.table()}
    assert rows["state.0.exp_avg"].source_names == ("optimizer.state.0.exp_avg",)
    assert rows["state.0.exp_avg"].how == "cast"
    assert rows["state.0.step"].dtype == "float32"
    assert report.to_json()["tensors"] == 12
