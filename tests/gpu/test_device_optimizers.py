"""Optimizers on a device: state is loaded there, or deferred on the host, and training continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.simulated_device import Simulator
from support.training_runs import Kind, differences, resumed, stopped, train

pytestmark = pytest.mark.gpu

KINDS: dict[str, Kind] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW capturable": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True),
    "RMSprop capturable": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, capturable=True),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("wait", [None, "cpu"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_twenty_more_steps_are_the_same(tmp_path: Path, device: str, kind: Kind, wait: str | None) -> None:
    model, optimizer = stopped(tmp_path / "run.pt", kind, on=device)
    again, ours = resumed(tmp_path / "run.pt", kind, on=device, device=wait)
    if wait:
        values = [value for state in ours.state.values() for value in state.values()]
        assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cpu"}
        assert len(ours._optimizer_step_pre_hooks) == 1
    else:
        assert not differences(ours.state_dict(), optimizer.state_dict())
    train(model, optimizer, 20, first=5)
    train(again, ours, 20, first=5)
    assert not differences(again.state_dict(), model.state_dict())
    assert not differences(ours.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("seed", [None, 0])
def test_training_continues_on_the_second_device(
    tmp_path: Path, second_device: str, sim: Simulator, seed: int | None
) -> None:
    sim.schedule(seed)
    model, optimizer = stopped(tmp_path / "run.pt", KINDS["AdamW"], on=second_device)
    again, ours = resumed(tmp_path / "run.pt", KINDS["AdamW"], on=second_device)
    train(model, optimizer, 3, first=5)
    train(again, ours, 3, first=5)
    assert not differences(again.state_dict(), model.state_dict())
    assert not differences(ours.state_dict(), optimizer.state_dict())
