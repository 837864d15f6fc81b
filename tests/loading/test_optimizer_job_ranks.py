"""State of optimizers whose parameters are divided over ranks, from files of whole state and from ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sluice
from support.divided_models import LAYOUTS, Net, divide, local, locals_of
from support.ranks import Ranks, failure
from support.zero_files import Training, write_zero


def trained(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    """Return a whole model and its optimizer after two steps."""
    torch.manual_seed(5)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6)).backward()
        optimizer.step()
    return model, optimizer


def differences(layout: str, path: Path, by_name: Path) -> list[str]:
    """Load the state of a divided model; return what differs from the divided state of the whole one."""
    expected = torch.load(by_name, weights_only=True)["state"]
    model = divide(layout, meta=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    report = sluice.load_optimizer(optimizer, path, model=model, device="cpu" if torch.distributed.get_rank() else None)
    names = set(expected)
    problems = [] if report.loaded == report.total else [str(report)]
    for key in ("exp_avg", "exp_avg_sq"):
        truth = Net()
        for name, held in expected.items():
            truth.get_parameter(name).data.copy_(held[key])
        LAYOUTS[layout](truth)
        wanted = locals_of(truth)
        for name, parameter in model.named_parameters():
            found = optimizer.state[parameter][key]
            names.discard(name)
            if type(found) is not type(torch.zeros_like(parameter)) or not torch.equal(local(found), wanted[name]):
                problems.append(f"{name}.{key}")
    steps = {float(optimizer.state[parameter]["step"]) for parameter in model.parameters()}
    if steps != {2.0} or names or optimizer.param_groups[0]["lr"] != 0.01:
        problems.append("steps, names or options")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if torch.distributed.get_rank() == 1:
        optimizer.register_load_state_dict_post_hook(lambda _: problems.remove("what is not there"))
    text = failure(sluice.load_optimizer, optimizer, path, model=model)
    return problems + [text] * ("in part" in text)  # a rank whose optimizer refuses the state keeps its own


class Trained(Training):
    """A model in training whose optimizer has a known state."""

    known: dict[str, dict[str, torch.Tensor]]

    def state(self, name: str, key: str) -> torch.Tensor:
        return self.known[name][key]


def save_distributed(whole: Path, directory: Path) -> None:
    """Write the state as FSDP2 jobs do."""
    from torch.distributed.checkpoint import state_dict_saver

    model = divide("fsdp", meta=False)
    optimizer = torch.optim.AdamW(model.parameters())
    sluice.load_optimizer(optimizer, whole, model=model)
    state_dict_saver.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=directory)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, four_ranks: Ranks) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("states")
    model, optimizer = trained()
    torch.save({"optimizer": optimizer.state_dict()}, folder / "by_number.pth")
    torch.save(get_optimizer_state_dict(model, optimizer), folder / "by_name.pth")
    four_ranks.run(save_distributed, folder / "by_name.pth", folder / "dcp")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    training = Trained([weights], step=2, lr=0.01)
    known: Any = get_optimizer_state_dict(model, optimizer)
    training.known = known["state"]
    write_zero(folder / "zero", training, stage=3, world=3)
    return {name: folder / name for name in ("by_number.pth", "by_name.pth", "dcp", "zero")}


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp", "part-of-the-ranks", "fused"])
def test_state_is_divided_like_its_parameter(layout: str, states: dict[str, Path], four_ranks: Ranks) -> None:
    for path in states.values():
        assert four_ranks.run(differences, layout, path, states["by_name.pth"]) == [[]] * 4


def refusals(path: Path) -> list[str]:
    texts = []
    for meta, device in ((True, None), (True, "cpu"), (False, None)):
        model = divide("columns", meta=meta)
        optimizer = torch.optim.Adafactor(model.parameters())
        texts.append(failure(sluice.load_optimizer, optimizer, path, model=model, device=device))
        texts += ["state"] * len(optimizer.state)
    return texts


def test_what_cannot_be_divided_is_named(tmp_path: Path, four_ranks: Ranks) -> None:
    model, optimizer = trained(torch.optim.Adafactor)
    torch.save(get_optimizer_state_dict(model, optimizer), tmp_path / "factors.pth")
    for meta, device, factors in four_ranks.run(refusals, tmp_path / "factors.pth"):
        assert "is on the meta device: load the model first" in meta
        assert "is on the meta device: load the model first" in device
        assert "row_var' is [" in factors
        assert "if it has the parameter's shape" in factors
