"""Modules that override ``_load_from_state_dict``: supported, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import empty, load, problem

State = dict[str, Any]


class Renames(nn.Linear):
    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        for old, new in (("kernel", "weight"), ("offset", "bias")):
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class IgnoresUnexpected(nn.Linear):
    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        rest[3].clear()


class MissesNoBias(nn.Linear):
    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "bias" in rest[2]:
            rest[2].remove(prefix + "bias")


class CopiesByItself(nn.Linear):
    def _load_from_state_dict(self, state_dict: State, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "kernel"].detach())
            self.bias.data.copy_(state_dict[prefix + "bias"])


class ByVersion(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict: State, prefix: str, metadata: State, *rest: Any) -> None:
        if metadata.get("version") is None:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class NeedsVersion(nn.Module):
    """Holds no tensor itself and refuses state dicts without its version, as torchvision's MNASNet."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3))

    def _load_from_state_dict(self, state_dict: State, prefix: str, metadata: State, *rest: Any) -> None:
        if metadata.get("version") not in {1, 2}:
            raise ValueError(f"version {metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class CountsByItself(nn.BatchNorm1d):
    """A norm with a loader of its own, on top of torch's, which makes the counter of old state dicts."""

    def __init__(self, *_: int) -> None:
        super().__init__(3)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class Metric(nn.Linear):
    """Keeps state in attributes that are neither parameters nor buffers."""

    def __init__(self, *_: int) -> None:
        super().__init__(2, 3)
        self.total = torch.zeros(())

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        self.total = state_dict.pop(prefix + "total")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Scalar(nn.Module):
    """Loads a tensor of one element into a scalar, as stored by old versions."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.0))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def states() -> dict[str, tuple[type[nn.Module], State]]:
    weight, bias = torch.randn(3, 2), torch.randn(3)
    return {
        "renames": (Renames, {"kernel": weight, "offset": bias}),
        "renames nothing": (Renames, {"weight": weight, "bias": bias}),
        "ignores": (IgnoresUnexpected, {"weight": weight, "bias": bias, "other": torch.ones(1)}),
        "copies": (CopiesByItself, {"kernel": weight, "bias": bias}),
        "version": (ByVersion, {"kernel": weight, "bias": bias}),
        "metric": (Metric, {"weight": weight, "bias": bias, "total": torch.rand(())}),
        "counter": (CountsByItself, {n: torch.rand(3) for n in ("weight", "bias", "running_mean", "running_var")}),
        "scalar": (Scalar, {"weight": torch.ones(1)}),
    }


@pytest.mark.parametrize("name", states())
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_loader_does_to_names_is_done(name: str, meta: bool, nested: bool) -> None:
    kind, state = states()[name]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), kind(2, 3)) if nested else kind(2, 3)

    if nested:
        state = {
            **{f"0.{k}": v for k, v in nn.Linear(2, 2).state_dict().items()},
            **{f"1.{k}": v for k, v in state.items()},
        }
    expected, model = build(), empty(build) if meta else build()
    expected.load_state_dict(state)
    report = load(model, state)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert (report.missing, report.unexpected) == ((), ())
    for part, like in zip(model.modules(), expected.modules(), strict=True):
        if isinstance(like, Metric):
            assert torch.equal(part.total, like.total)


@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: nn.ModuleDict({"module": net}), nn.Sequential])
def test_the_version_in_the_file_reaches_modules_without_tensors(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    expected = wrap(NeedsVersion())
    torch.save({"model": expected.state_dict(), "epoch": 1}, tmp_path / "f.pth")
    with sluice.empty_init():
        wrapped, bare = wrap(NeedsVersion()), NeedsVersion()
    sluice.load_into(wrapped, tmp_path / "f.pth")
    assert same(dict(wrapped.state_dict()), dict(expected.state_dict()))
    sluice.load_into(bare, tmp_path / "f.pth")
    assert torch.equal(bare.layers[0].weight, next(expected.parameters()))  # type: ignore[arg-type]
    torch.save(dict(expected.state_dict()), tmp_path / "f.pth")
    with pytest.raises(sluice.MismatchError, match="version None"):
        sluice.load_into(bare, tmp_path / "f.pth")


def test_what_a_loader_does_not_miss_keeps_its_value_or_is_initialised() -> None:
    state = {"weight": torch.ones(3, 2)}
    live, model = MissesNoBias(2, 3), empty(lambda: MissesNoBias(2, 3))
    kept = live.bias.clone()
    load(live, state)
    assert torch.equal(live.bias, kept)
    with pytest.raises(sluice.MismatchError) as caught:
        load(model, state)  # there is no value to keep
    assert caught.value.missing == ("bias",)
    report = load(model, state, strict=False)
    assert (report.initialised, report.missing) == (("bias",), ("bias",))
    assert 0 < model.bias.abs().max() < 1
    assert "'weight'" in problem(live, {"bias": torch.ones(3)})


def test_a_loader_that_requires_no_tensor_may_set_an_attribute_alone() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("unused", torch.ones(2))
            self.total = torch.zeros(())

        def _load_from_state_dict(self, state_dict: State, prefix: str, *_: Any) -> None:
            self.total = state_dict.pop(prefix + "total")

    metric = Total()
    load(metric, {"total": torch.tensor(4.0)})
    assert metric.total == 4


def adds(self: nn.Linear, state: State, prefix: str, *_: Any) -> None:
    with torch.no_grad():
        self.weight += state[prefix + "weight"]


def sets(self: Any, *_: Any) -> None:
    self.loaded = True


def resizes(self: nn.Linear, state: State, prefix: str, *_: Any) -> None:
    self.weight.data.resize_(5, 5)


def fails(self: nn.Linear, state: State, prefix: str, *_: Any) -> None:
    state[prefix + "weight"].tolist()


def raises(self: nn.Linear, state: State, prefix: str, *_: Any) -> None:
    raise ValueError("too small")


def complains(self: nn.Linear, state: State, prefix: str, *rest: Any) -> None:
    rest[-1].append("too old")


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (adds, r"writes to tensors with \w*add_"),
        (sets, "sets the attribute 'loaded'"),
        (resizes, "writes to tensors with resize_"),
        (fails, r"reads elements with tolist\(\)"),
        (raises, r"fails on tensors without data: ValueError: too small \(test_custom_loaders.py, line \d+\)"),
        (complains, "rejects the state dict: too old"),
    ],
)
def test_unsupported_loaders_are_refused_by_name_and_leave_the_module_unchanged(
    loader: Callable[..., None], why: str
) -> None:
    kind = type("Own", (nn.Linear,), {"_load_from_state_dict": loader})
    model = nn.Sequential(nn.Linear(2, 2), kind(2, 2))
    attributes = dict(vars(model[1]))
    text = problem(model, model.state_dict())
    assert re.search(why, text)
    assert re.search(r"the _load_from_state_dict of 1 \(Own\)|the load_state_dict of .* of Own\n", text)
    assert vars(model[1]) == attributes


@pytest.mark.parametrize("name", ["_load_from_state_dict", "load_state_dict"])
def test_a_loader_of_one_object_is_refused(name: str) -> None:
    model = nn.Linear(2, 2)
    setattr(model, name, lambda *_: None)
    assert "is set on the instance, not the class" in problem(model, model.state_dict())


def test_the_line_of_a_loader_of_torch_is_its_own() -> None:
    model = torch.ao.quantization.PerChannelMinMaxObserver()
    assert re.search(r"writes to tensors with resize_ \(observer.py, line \d+\)", problem(model, model.state_dict()))
