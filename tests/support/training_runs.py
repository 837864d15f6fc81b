"""Small training runs with every kind of optimizer, to be stopped, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import sluice
from support.oracles import bits

Kind = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """A model with matrices of several shapes, vectors, a scalar, a frozen part and an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(x) + self.scale * self.down(torch.tanh(self.up(x)))
        return found


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, other parameters without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]


def states_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


KINDS: dict[str, Kind] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "Adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW two groups": lambda m: torch.optim.AdamW(grouped(m), lr=0.01),
    "AdamW tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "AdamW named": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "LBFGS": lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad], lr=0.1, max_iter=3),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    KINDS["Muon"] = lambda m: torch.optim.Muon(matrices(m), lr=0.02)


def train(model: nn.Module, optimizer: Optimizer, steps: int, *, first: int = 0) -> None:
    """Train for some steps; the number of a step determines its inputs."""
    parameter = next(model.parameters())
    for step in range(first, first + steps):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(parameter)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            found: torch.Tensor = (model(inputs) - inputs.flip(-1)).square().mean()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)  # type: ignore[no-untyped-call]
        else:
            loss()
            optimizer.step()


def stopped(
    path: Path, kind: Kind, *, dtype: torch.dtype = torch.float32, on: str = "cpu"
) -> tuple[nn.Module, Optimizer]:
    """Train for five steps on a device, save a training checkpoint, and return the model and optimizer."""
    model = net(dtype=dtype).to(on)
    optimizer = kind(model)
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, path)
    return model, optimizer


def resumed(
    path: Path, kind: Kind, *, dtype: torch.dtype = torch.float32, on: str = "cpu", **how: Any
) -> tuple[nn.Module, Optimizer]:
    """Return a fresh model on a device and its optimizer, filled from the checkpoint."""
    model = net(seed=1, dtype=dtype).to(on)
    with sluice.open(path) as checkpoint:
        sluice.load_into(model, checkpoint)
        optimizer = kind(model)
        sluice.load_optimizer(optimizer, checkpoint, **how)
    return model, optimizer


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Return the paths where two nested states differ in structure, type, value, dtype, device, stride or sharing."""
    if isinstance(theirs, torch.Tensor):
        if type(ours) is not type(theirs):
            return [f"{path}: {type(ours)} is not {type(theirs)}"]
        looks = [(t.dtype, t.device, t.shape, t.stride(), t.requires_grad) for t in (ours, theirs)]
        same = looks[0] == looks[1] and (theirs.is_meta or bits(ours) == bits(theirs))
        return [] if same else [f"{path}: {ours} is not {theirs}"]
    if isinstance(theirs, dict):
        if type(ours) is not type(theirs) or ours.keys() != theirs.keys():
            return [f"{path}: keys {list(ours)} are not {list(theirs)}"]
        return [text for key in theirs for text in differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(theirs, (list, tuple)):
        if type(ours) is not type(theirs) or len(ours) != len(theirs):
            return [f"{path}: {ours} is not {theirs}"]
        return [
            text
            for i, (one, two) in enumerate(zip(ours, theirs, strict=True))
            for text in differences(one, two, f"{path}.{i}")
        ]
    return [] if type(ours) is type(theirs) and ours == theirs else [f"{path}: {ours!r} is not {theirs!r}"]
