"""Training of streamed models: adapters without peft, and steps whose every number is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

#: Loss and gradients of each step, and the parameters at the end.
Course = tuple[list[list[torch.Tensor]], list[torch.Tensor]]


class Adapted(nn.Module):
    """A layer and its adapter of low rank, with dropout."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + self.up(self.down(self.dropout(x)))
        return result


def adapt(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Freeze a model, and give adapters to the layers whose names end with one of these; the values are fixed."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for path, layer in list(model.named_modules()):
        around, _, name = path.rpartition(".")
        if name in names and getattr(layer, "weight", None) is not None:
            outputs, inputs = layer.weight.shape
            if not isinstance(layer, nn.Linear):  # Conv1D of transformers
                inputs, outputs = outputs, inputs
            setattr(model.get_submodule(around), name, Adapted(layer, inputs, outputs))
    return model


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    *,
    steps: int = 20,
    accumulate: int = 1,
    autocast: bool = False,
) -> Course:
    """Take steps of AdamW; the random numbers are the same for each model."""
    torch.manual_seed(2)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model)
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(each.grad.clone() for each in trained if each.grad is not None)])
        optimizer.step()
        optimizer.zero_grad()
    return found, [parameter.detach().clone() for parameter in trained]


def same(one: Course, other: Course) -> bool:
    """Return whether two courses have the same bits, and gradients at all."""
    pairs = [*zip(one[0], other[0], strict=True), (one[1], other[1])]
    assert all(len(step) > 1 for step in one[0])
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)
