"""State that stays on the host until the first step. The meta device replaces an accelerator: steps run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import MismatchError
from support.trained_net import empty
from support.training_runs import KINDS, Net, differences, net, stopped, train


def elsewhere() -> Net:
    """Return the model on another device, with gradients."""
    model = net().to("meta")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def devices(optimizer: torch.optim.Optimizer, key: str) -> set[str]:
    return {str(state[key].device) for state in optimizer.state.values() if key in state}


@pytest.mark.parametrize("loads", [1, 2])
@pytest.mark.parametrize("key", ["AdamW", "AdamW foreach", "RMSprop", "Adam amsgrad", "SGD momentum"])
def test_state_stays_on_the_host_and_moves_at_the_first_step(tmp_path: Path, key: str, loads: int) -> None:
    kind = KINDS[key]
    _, optimizer = stopped(tmp_path / "run.pt", kind)
    ours = kind(elsewhere())
    for _ in range(loads):
        report = sluice.load_optimizer(ours, tmp_path / "run.pt", device="cpu")
    assert report.devices == ("cpu",)
    assert not differences(ours.state_dict(), optimizer.state_dict())
    assert all(type(tensor) is torch.Tensor for state in ours.state.values() for tensor in state.values())
    big = next(name for name, tensor in next(iter(ours.state.values())).items() if name != "step")
    assert len(ours._optimizer_step_pre_hooks) == loads
    ours.step()
    assert devices(ours, big) == {"meta"}
    assert devices(ours, "step") <= {"cpu"}  # torch keeps it on the host unless the optimizer is fused or capturable
    ours.step()


def test_a_capturable_step_moves_too(tmp_path: Path) -> None:
    _, optimizer = stopped(tmp_path / "run.pt", KINDS["AdamW"])
    state = optimizer.state_dict()
    state["param_groups"][0]["capturable"] = True
    torch.save(state, tmp_path / "o.pt")
    ours = KINDS["AdamW"](elsewhere())
    sluice.load_optimizer(ours, tmp_path / "o.pt", device="cpu")
    assert devices(ours, "step") == {"cpu"}
    [hook] = ours._optimizer_step_pre_hooks.values()
    hook(ours, (), {})
    assert devices(ours, "step") == devices(ours, "exp_avg") == {"meta"}


def test_nothing_is_deferred_if_the_parameters_are_on_the_device(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", KINDS["AdamW"])
    ours = KINDS["AdamW"](net())
    sluice.load_optimizer(ours, tmp_path / "run.pt", device="cpu")
    assert not ours._optimizer_step_pre_hooks


def test_a_model_may_come_after_its_state(tmp_path: Path) -> None:
    kind = KINDS["AdamW"]
    model, optimizer = stopped(tmp_path / "run.pt", kind)
    again = empty(net)
    again.frozen.requires_grad_(False)
    ours = kind(again)
    with pytest.raises(MismatchError, match=r"on the meta device: load the model first"):
        sluice.load_optimizer(ours, tmp_path / "run.pt")
    assert not ours.state
    with sluice.open(tmp_path / "run.pt") as checkpoint:
        sluice.load_optimizer(ours, checkpoint, device="cpu")
        sluice.load_into(again, checkpoint)
    train(model, optimizer, 5)
    train(again, ours, 5)
    assert not differences(ours.state_dict(), optimizer.state_dict())
    assert not differences(again.state_dict(), model.state_dict())


def test_lists_and_tuples_move_too(tmp_path: Path) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, model: Net) -> None:
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    model = net()
    optimizer = Own(model)
    optimizer.state[model.scale] = {"list": [torch.ones(2), 1], "tuple": (torch.ones(1), [torch.ones(3)])}
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    again = elsewhere()
    ours = Own(again)
    sluice.load_optimizer(ours, tmp_path / "o.pt", device="cpu")
    state = ours.state[again.scale]
    assert not differences(dict(state), optimizer.state[model.scale])
    ours.step()
    assert (state["list"][0].is_meta, state["list"][1]) == (True, 1)
    assert state["tuple"][0].is_meta
    assert state["tuple"][1][0].is_meta
