"""Models for tests of streams, whose weights are large enough to be streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice

_Model = TypeVar("_Model", bound=nn.Module)

#: A square weight of this width has 1 MiB, like the targets that get a mapping of their own.
WIDTH = 512

IDS = torch.tensor([[1, 2, 3, 999]])


class Layers(nn.Module):
    """An embedding, blocks in a list, and a head, which may be tied to the embedding."""

    def __init__(self, *, count: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count))
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.skip: set[int] = set()

    def linear(self, number: int) -> nn.Linear:
        """Return the layer of a block."""
        found = self.get_submodule(f"layers.{number}.0")
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            if number not in self.skip:
                x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Checkpointed(Layers):
    """The blocks are computed again in the backward pass."""

    reentrant = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        result: torch.Tensor = self.head(x)
        return result


class _Routed(nn.Module):
    """A block with experts in a list, of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        result: torch.Tensor = self.experts[chosen](self.own(x))
        return result


class Experts(nn.Module):
    """Blocks with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Routed() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x


class Repeated(nn.Module):
    """One block that is called several times, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for _ in range(4):
            x = torch.tanh(self.layers[1](x))
        result: torch.Tensor = self.layers[2](x)
        return result


def block_bytes() -> int:
    """Return the bytes that a weight of 1 MiB takes in recycled memory, with its bias."""
    return (1 << 20) + (128 << 10)


def saved(make: Callable[[], _Model], path: Path) -> _Model:
    """Return a model with random weights, which is saved at ``path``."""
    torch.manual_seed(0)
    model = make().eval()
    torch.save(model.state_dict(), path)
    return model


def empty(make: Callable[[], _Model]) -> _Model:
    """Return a model without memory."""
    with sluice.empty_init():
        return make().eval()


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
