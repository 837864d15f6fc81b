"""A small net with ties, shared blocks and buffers of both kinds, and comparison of two nets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice._errors import MismatchError
from sluice.modules.empty_init import empty_init
from support.oracles import bits

OLD_WEIGHT_NORM = "ignore:.*weight_norm. is deprecated:FutureWarning"


class Attention(nn.Module):
    """A module with a saved causal mask and non-persistent rotary frequencies."""

    mask: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.register_buffer("mask", torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, width + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ (x * self.frequencies).mT
        result: torch.Tensor = scores.masked_fill(self.mask, -1e9).softmax(-1) @ x
        return result


class Net(nn.Module):
    """A net with ties, a shared block, norms, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = Attention()
        self.again = self.first
        self.layers = nn.ModuleList([Attention(), nn.LayerNorm(6)])
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(self.embedding(tokens)))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x) * self.scale)
        return result


TOKENS = torch.arange(8).reshape(2, 4)


def trained() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(TOKENS)
    return net.eval()


def empty(build: Callable[[], nn.Module] = Net) -> Any:
    with empty_init():
        return build()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(ours[name], tensor), name


def load(module: nn.Module, state_dict: Mapping[str, torch.Tensor], **options: Any) -> sluice.LoadReport:
    """Load a state dict from a file."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state_dict, Path(folder, "f.pth"))
        return sluice.load_into(module, Path(folder, "f.pth"), **options)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Fail if the block replaces, moves or writes to a tensor of a module."""
    before = _looks(module)
    yield
    assert _looks(module) == before


def _looks(module: nn.Module) -> dict[str, object]:
    tensors = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    return {name: (id(t), t.is_meta or (t._version, t.data_ptr(), bits(t))) for name, t in tensors.items()}


def problem(module: nn.Module, state_dict: Mapping[str, torch.Tensor], **options: Any) -> str:
    with unchanged(module), pytest.raises(MismatchError) as caught:
        load(module, state_dict, **options)
    return str(caught.value)
