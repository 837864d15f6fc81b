"""Modules that keep tensors in different ways, with an input for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

Build = Callable[[], nn.Module]


class Scaled(nn.Module):
    """0-d, complex, boolean, frozen and empty tensors; a rotary table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("rotary", 1.0 / 10000 ** (torch.arange(4) / 4), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * self.scale * self.phase.abs() * self.frozen * self.get_buffer("rotary")
        return out.masked_fill(self.get_buffer("mask"), 0) + self.get_buffer("counts")


class Collections(nn.Module):
    """Parameters in a list and in a dict, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(4))
        self.listed = nn.ParameterList([shared, nn.Parameter(torch.randn(4)), shared])
        self.named = nn.ParameterDict({"a": shared, "b": nn.Parameter(torch.randn(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((*self.listed, *self.named.values()), x)


class Shared(nn.Module):
    """One block under three names, two layers with one weight, an alias of a part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.blocks = nn.ModuleList([self.block, self.block, nn.Linear(4, 4)])
        self.alias = self.block[0]
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.alias.get_parameter("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.blocks, self.alias, self.head):
            x = layer(x)
        return x


class Attended(nn.Module):
    """torch's own attention, with a bias for keys and values, and a padded embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mixed, _ = self.attention(x, x, x)
        result: torch.Tensor = self.bilinear(x, mixed)
        return result


class Renaming(nn.Linear):
    """Older versions named the weight ``kernel`` and had an additional tensor."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        state_dict.pop(prefix + "obsolete", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Extra(nn.Linear):
    """A module with extra state: plain values and a tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.extra: Any = {"steps": 0, "history": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Hooked(nn.Linear):
    """Saves its weight under a different name, and loads it from that name."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_state_dict_hook(self._rename_saved)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._rename_loaded)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename_saved(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: object) -> None:
        state_dict[prefix + "kernel"] = state_dict.pop(prefix + "weight")

    @staticmethod
    def _rename_loaded(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: object) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


class SetsData(nn.Linear):
    """A constructor that replaces the data of its weight by a different shape, and changes part of its bias."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.weight.data = torch.eye(4)
        self.bias.data = torch.zeros(4)
        self.bias.data[1:] = 1.0


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0)


def _tied_parametrized() -> nn.Module:
    """Two layers whose parametrizations hold one parameter."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.weight_norm(nn.Linear(4, 4)))
    first: Any = model[0]
    second: Any = model[1]
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    return model


IMAGE, ROWS, SEQUENCE = (2, 4, 5, 5), (4, 4), (3, 2, 4)

#: Name -> constructor and shape of the input; ``tokens`` are integers.
ZOO: dict[str, tuple[Build, tuple[int, ...]]] = {
    "scaled": (Scaled, ROWS),
    "collections": (Collections, ROWS),
    "shared": (Shared, ROWS),
    "attended": (Attended, (3, 2)),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "lstm": (lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), SEQUENCE),
    "gru": (lambda: nn.GRU(4, 5), SEQUENCE),
    "parametrized lstm": (lambda: parametrizations.weight_norm(nn.LSTM(4, 5), "weight_hh_l0"), SEQUENCE),
    "rnn cell": (lambda: nn.RNNCell(4, 5), ROWS),
    "transformer layer": (_layer, SEQUENCE),
    "cloned layers": (lambda: nn.TransformerEncoder(_layer(), 2, enable_nested_tensor=False), SEQUENCE),
    "pretrained": (lambda: nn.Sequential(nn.Embedding.from_pretrained(torch.ones(9, 4))), (3, 2)),  # type: ignore[no-untyped-call]
    "data set": (SetsData, ROWS),
    "convolution": (lambda: nn.Conv2d(4, 4, 3), IMAGE),
    "channels last": (lambda: nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last), IMAGE),  # type: ignore[call-overload]
    "nested": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.PReLU(), nn.Sequential(nn.Linear(4, 2)))), ROWS),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), ROWS),
    "tied weight norm": (_tied_parametrized, ROWS),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), ROWS),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), ROWS),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), ROWS),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), ROWS),  # type: ignore[no-untyped-call]
    "renaming": (lambda: nn.Sequential(Renaming(4, 4)), ROWS),
    "extra state": (lambda: nn.Sequential(Extra()), ROWS),
    "hooked": (lambda: nn.Sequential(Hooked()), ROWS),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), ROWS),
    "half": (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), ROWS),
}


def sample(name: str) -> torch.Tensor:
    """Return an input for a module of the zoo."""
    shape = ZOO[name][1]
    generator = torch.Generator().manual_seed(1)
    if name in {"attended", "pretrained"}:
        return torch.randint(9, shape, generator=generator)
    drawn = torch.randn(shape, generator=generator)
    return drawn.bfloat16() if name == "half" else drawn


def trained(name: str) -> nn.Module:
    """Return a module of the zoo after a forward pass, so that its buffers differ from those of the constructor."""
    torch.manual_seed(0)
    module = ZOO[name][0]()
    module(sample(name))
    for tensor in module.parameters():
        if tensor.is_floating_point() and tensor.requires_grad:
            tensor.data += torch.rand_like(tensor) / 8
    if isinstance(module, nn.Sequential) and isinstance(module[0], Extra):
        module[0].extra = {"steps": 7, "history": torch.rand(2), "names": ["a", None], "twice": [torch.eye(2)] * 2}
    return module
