"""Training after a load continues as without the interruption, bit for bit, for every kind of optimizer.

Resuming from checkpoints of training loops: single files, directories of Trainer and accelerate, DCP.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sluice
from sluice import BudgetError, LimitError, MismatchError, ReadError
from support.distributed import save as save_distributed
from support.oracles import same
from support.sources import RecordingSource, record_reads
from support.trained_net import empty
from support.training_runs import KINDS, Kind, differences, net, resumed, stopped, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),  # LBFGS of torch 2.8
]


def as_torch(
    path: Path, kind: Kind, dtype: torch.dtype = torch.float32
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, sluice.LoadReport]:
    """Return the optimizer that sluice fills, which equals torch's, that one, and the report."""
    theirs, ours = kind(net(dtype=dtype)), kind(net(dtype=dtype))
    theirs.load_state_dict(torch.load(path)["optimizer"])
    report = sluice.load_optimizer(ours, path)
    assert not differences(ours.state_dict(), theirs.state_dict())
    return ours, theirs, report


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_twenty_more_steps_are_the_same(tmp_path: Path, kind: Kind) -> None:
    model, optimizer = stopped(tmp_path / "run.pt", kind)
    again, filled = resumed(tmp_path / "run.pt", kind)
    assert not differences(filled.state_dict(), optimizer.state_dict())
    train(model, optimizer, 20, first=5)
    train(again, filled, 20, first=5)
    assert not differences(again.state_dict(), model.state_dict())
    assert not differences(filled.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_state_of_parameters_in_half_precision_equals_torchs(tmp_path: Path, kind: Kind) -> None:
    stopped(tmp_path / "run.pt", kind)
    _, _, report = as_torch(tmp_path / "run.pt", kind, torch.bfloat16)
    assert (report.key, report.missing, report.unexpected) == ("optimizer", (), ())


@pytest.mark.parametrize("name", ["AdamW", "AdamW two groups", "SGD momentum"])
def test_what_was_frozen_after_it_was_trained_keeps_its_state(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    model = net()
    optimizer = kind(model)
    train(model, optimizer, 5)
    model.up.requires_grad_(False)
    model.zero_grad()
    train(model, optimizer, 2, first=5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    again = net(seed=1)
    again.up.requires_grad_(False)
    filled = kind(again)
    with sluice.open(tmp_path / "run.pt") as checkpoint:
        sluice.load_into(again, checkpoint)
        sluice.load_optimizer(filled, checkpoint)
    assert filled.state[again.up.weight]
    for one, other in ((model, optimizer), (again, filled)):
        train(one, other, 10, first=7)
        one.up.requires_grad_(True)
        train(one, other, 10, first=17)
    assert not differences(again.state_dict(), model.state_dict())
    assert not differences(filled.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(("kind", "number"), [("AdamW", torch.Tensor.double), ("Adam", int)])
def test_a_step_of_another_type_becomes_the_tensor_that_torch_makes_of_it(
    tmp_path: Path, kind: str, number: Any
) -> None:
    _, optimizer = stopped(tmp_path / "run.pt", KINDS[kind])
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["capturable"] = number is not int
    for values in state["state"].values():
        values["step"] = number(values["step"])
    torch.save({"optimizer": state}, tmp_path / "other.pt")
    ours, _, report = as_torch(tmp_path / "other.pt", KINDS[kind])
    assert ours.state[next(iter(ours.state))]["step"].dtype is torch.float32
    assert report.cast == ({} if number is int else {"float64->float32": len(ours.state)})


class Lion(torch.optim.Optimizer):
    """A custom optimizer with state that torch's lack: integers, lists, text, one tensor for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "precision": torch.float32})
        self.shared = torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("sign", torch.zeros_like(parameter, dtype=torch.int8)).copy_(parameter.grad.sign())
                    state.setdefault("shared", self.shared).add_(1)
                    state.setdefault("parts", [torch.ones(2), {"step": torch.tensor(3), "none": None}])
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(state["sign"].to(parameter.dtype), alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_that_is_not_torchs(tmp_path: Path, dtype: torch.dtype) -> None:
    stopped(tmp_path / "run.pt", lambda m: Lion(m.parameters()))
    ours, theirs, _ = as_torch(tmp_path / "run.pt", lambda m: Lion(m.parameters()), dtype)
    assert ours.param_groups[0]["precision"] is torch.float32
    # As in torch, a shared tensor stays shared without a cast, and becomes one per parameter with a cast.
    for optimizer in (ours, theirs):
        memory = {state["shared"].data_ptr() for state in optimizer.state.values()}
        assert len(memory) == (1 if dtype is torch.float32 else len(optimizer.state))


def test_state_that_belongs_to_no_parameter_is_kept(tmp_path: Path) -> None:
    kind = KINDS["AdamW"]
    _, optimizer = stopped(tmp_path / "run.pt", kind)
    state = optimizer.state_dict()
    state["state"]["global"] = {"loss": torch.tensor(1, dtype=torch.int32), "seen": [1, 2]}
    torch.save(state, tmp_path / "more.pt")
    ours = kind(net(dtype=torch.bfloat16))
    sluice.load_optimizer(ours, tmp_path / "more.pt")
    kept: Any = ours.state["global"]  # type: ignore[index]
    assert kept["loss"].dtype is torch.int32
    assert kept["seen"] == [1, 2]


#: Arguments that a kind needs, and the names of all of torch's optimizers.
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
)


def made(kind: str, *, steps: int) -> optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    optimizer: optim.Optimizer = getattr(optim, kind)(parameters, **OPTIONS.get(kind, {}))
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: optim.Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]

    def loss() -> torch.Tensor:
        for parameter in parameters:
            gradient = 2 * parameter.detach()
            parameter.grad = gradient.to_sparse() if isinstance(optimizer, optim.SparseAdam) else gradient
        return torch.stack([parameter.detach().square().sum() for parameter in parameters]).sum()

    loss()
    optimizer.step(loss)  # type: ignore[arg-type]  # a tensor, as in torch's own examples


@pytest.mark.parametrize("own", OPTIMIZERS)
@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_a_state_loads_and_trains_or_is_refused(saved: str, own: str, tmp_path: Path) -> None:
    torch.save(made(saved, steps=2).state_dict(), tmp_path / "f.pt")
    optimizer = made(own, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    try:
        sluice.load_optimizer(optimizer, tmp_path / "f.pt")
    except sluice.MismatchError as error:
        assert saved != own
        assert f"which {own} needs" in str(error)
        assert same(optimizer.state_dict(), before)
        return
    torch_own = made(own, steps=1)
    torch_own.load_state_dict(torch.load(tmp_path / "f.pt"))
    assert same(optimizer.state_dict(), torch_own.state_dict())
    step(optimizer)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_optimizer_whose_own_code_fails_is_unchanged(tmp_path: Path, error: type[BaseException]) -> None:
    class Own(optim.Adam):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            raise error("own")

    torch.save(made("Adam", steps=2).state_dict(), tmp_path / "f.pt")
    optimizer = Own([nn.Parameter(torch.randn(3, 4)) for _ in range(2)])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((sluice.MismatchError, KeyboardInterrupt), match=r"^own$|KeyError: 'own'; the .* unchanged"):
        sluice.load_optimizer(optimizer, tmp_path / "f.pt")
    assert same(optimizer.state_dict(), before)


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


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_directory_of_trainer_or_accelerate(tmp_path: Path, name: str, opened: bool) -> None:
    directory = tmp_path / "checkpoint-5"
    directory.mkdir()
    model, optimizer = stopped(tmp_path / "run.pt", kind)
    safetensors.torch.save_file(dict(model.state_dict()), directory / "model.safetensors")
    torch.save(optimizer.state_dict(), directory / name)
    torch.save({"last_epoch": 3}, directory / "scheduler.pt")
    model = net(seed=1)
    ours = kind(model)
    if opened:
        with sluice.open(directory) as checkpoint:
            sluice.load_into(model, checkpoint)
            report = sluice.load_optimizer(ours, checkpoint)
    else:
        report = sluice.load_optimizer(ours, directory)
    assert report.source == str(directory / name)
    assert not differences(ours.state_dict(), optimizer.state_dict())
    (directory / name).unlink()
    with pytest.raises(MismatchError, match="no optimizer state"):
        sluice.load_optimizer(ours, directory)


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
