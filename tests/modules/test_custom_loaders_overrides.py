"""Modules that override ``load_state_dict``: what reaches torch's own is loaded, or refused by name."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import load, problem, unchanged

State = dict[str, Any]


class Net(nn.Module):
    """The base of the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)


class DropsAndRenames(Net):
    def load_state_dict(self, state_dict: State, **options: Any) -> Any:  # type: ignore[override]
        state_dict.pop("fc.weight", None)
        for name in list(state_dict):
            state_dict[name.replace("body.", "encoder.")] = state_dict.pop(name)
        return super().load_state_dict(state_dict, **options)


class AddsAPrefix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def load_state_dict(self, state_dict: State, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict({f"inner.{k}": v for k, v in state_dict.items()}, *arguments, **options)


class Delegates(nn.Module):
    """A wrapper whose own tensors are not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = DropsAndRenames()
        self.own = nn.Linear(1, 1)

    def load_state_dict(self, state_dict: State, strict: bool = True) -> Any:  # type: ignore[override]
        return self.wrapped.load_state_dict(state_dict, strict=strict)


class LoadsParts(Net):
    def load_state_dict(self, state_dict: State) -> Any:  # type: ignore[override]
        self.encoder.load_state_dict({k[5:]: v for k, v in state_dict.items() if k.startswith("body.")})
        missing, unexpected = self.head.load_state_dict({"weight": state_dict["head.weight"]}, strict=False)
        assert (missing, unexpected) == (["bias"], [])


class Retries(Net):
    def load_state_dict(self, state_dict: State, strict: bool = True) -> Any:  # type: ignore[override]
        try:
            return super().load_state_dict(state_dict, strict)
        except RuntimeError as error:
            assert "fc.weight" in str(error)
        renamed = {k.replace("body", "encoder"): v for k, v in copy.deepcopy(state_dict).items() if "fc" not in k}
        return super().load_state_dict(renamed, strict)


class Merges(Net):
    """Updates its own state dict with the names that fit."""

    def load_state_dict(self, state_dict: State, strict: bool = True) -> Any:  # type: ignore[override]
        own = self.state_dict()
        own.update({k: v for k, v in state_dict.items() if k in own and own[k].shape == v.shape})
        return super().load_state_dict(own, strict)


class CopiesByItself(Net):
    def load_state_dict(self, state_dict: State) -> Any:  # type: ignore[override]
        for name, tensor in self.state_dict().items():
            source = state_dict.get(name, state_dict.get(name.replace("encoder", "body")))
            tensor.copy_(source)


class Rearranges(Net):
    """Joins, transposes, slices and adds: all that can be planned."""

    def load_state_dict(self, state_dict: State, strict: bool = True) -> Any:  # type: ignore[override]
        state = OrderedDict((k.replace("body", "encoder"), v) for k, v in state_dict.items())
        first = state["encoder.0.weight"]
        state["encoder.0.weight"] = torch.cat([first.t()[:, :2].t(), first[1:2]])
        state["head.bias"] = state.pop("fc.weight")[0, 1:3].reshape(-1)
        state["encoder.1.running_mean"] = torch.arange(3.0)
        state["encoder.1.num_batches_tracked"] = torch.tensor(7)
        return super().load_state_dict(state, strict=strict)


class Assigns(Net):
    def load_state_dict(self, state_dict: State) -> Any:  # type: ignore[override]
        state = {k.replace("body", "encoder"): v for k, v in state_dict.items() if "fc" not in k}
        return super().load_state_dict(state, assign=True)


#: Names of the encoder of ``Net``, except the counter, which state dicts without versions do not have to have.
ENCODER = tuple(
    name for name in Net().state_dict() if name.startswith("encoder.") and not name.endswith("num_batches_tracked")
)


def old_state() -> State:
    """Return what an older version of the models saved."""
    net = Net()
    net.encoder[1].num_batches_tracked.fill_(5)  # type: ignore[operator]  # a buffer
    state = {
        k.replace("encoder", "body"): torch.rand_like(v) if v.dtype.is_floating_point else v
        for k, v in net.state_dict().items()
    }
    return state | {"fc.weight": torch.rand(1, 4)}


def build(kind: Callable[[], nn.Module], *, empty: bool) -> nn.Module:
    torch.manual_seed(1)
    if not empty:
        return kind()
    with sluice.empty_init():
        return kind()


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    "kind", [DropsAndRenames, LoadsParts, Retries, Merges, CopiesByItself, Rearranges, Assigns, Delegates]
)
def test_the_module_is_as_after_its_own_load_state_dict(kind: type[nn.Module], empty: bool) -> None:
    state = old_state()
    if kind is Assigns:
        state = {k: v.double() if v.dtype.is_floating_point else v for k, v in state.items()}
    expected, model = build(kind, empty=False), build(kind, empty=empty)
    expected.load_state_dict(dict(state))
    report = load(model, state, strict=not (empty and kind in {Delegates, Merges}))
    left = {LoadsParts: ("head.bias",), Delegates: ("own.",), Merges: ("encoder.",)}.get(kind, ())
    for name, tensor in model.state_dict().items():
        assert not tensor.is_meta
        initialised = empty and name.startswith(left or "-")
        assert initialised or same({name: tensor}, {name: expected.state_dict()[name]}), name
    missing: tuple[str, ...] = ("head.bias",) if kind is LoadsParts else ()
    if empty:
        missing = {Delegates: ("own.weight", "own.bias"), Merges: ENCODER}.get(kind, missing)
    assert report.missing == missing
    assert report.unexpected == ()


@pytest.mark.parametrize("kind", [Delegates, Merges])
def test_a_tensor_without_a_value_cannot_be_kept(kind: type[nn.Module]) -> None:
    model = build(kind, empty=True)
    with unchanged(model), pytest.raises(sluice.MismatchError) as caught:
        load(model, old_state())
    assert caught.value.missing == (("own.weight", "own.bias") if kind is Delegates else ENCODER)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("empty", [False, True])
def test_a_method_that_keeps_all_of_its_own_tensors_loads_nothing(empty: bool, strict: bool) -> None:
    model = build(Merges, empty=empty)
    text = problem(model, {"module.weight": torch.ones(2, 2), "other": torch.ones(3)}, strict=strict)
    assert "it has 0 of 9 tensors" in text


def reports_missing(self: Net, state: State, strict: bool = True) -> Any:
    own = self.state_dict()
    try:
        return nn.Module.load_state_dict(self, state)
    except RuntimeError as error:
        assert "size mismatch for head.bias: copying a param with shape torch.Size([7])" in str(error)
    state = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    return nn.Module.load_state_dict(self, state, strict=False)


def retries_with_a_part(self: Net, state: State, strict: bool = True) -> Any:
    try:
        return nn.Module.load_state_dict(self, state)
    except RuntimeError:
        bias = state["head.bias"][:2]
    return self.head.load_state_dict({"weight": state["head.weight"], "bias": bias})


def gives_up(self: Net, state: State, strict: bool = True) -> Any:
    with suppress(RuntimeError):
        nn.Module.load_state_dict(self, state)


@pytest.mark.parametrize("method", [reports_missing, retries_with_a_part, gives_up])
def test_shapes_whose_error_the_method_catches(method: Callable[..., Any]) -> None:
    kind = type("Own", (Net,), {"load_state_dict": method})
    state = {**Net().state_dict(), "head.bias": torch.rand(7)}
    expected, model = build(kind, empty=False), build(kind, empty=False)
    expected.load_state_dict(state)
    report = load(model, state)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert report.missing == (() if method is retries_with_a_part else ("head.bias",))
    if method is gives_up:
        with pytest.raises(sluice.MismatchError) as caught:
            load(build(kind, empty=True), state)
        assert caught.value.missing == ("head.bias",)


def test_a_method_without_strict_is_called_without_it() -> None:
    assert load(build(LoadsParts, empty=False), old_state(), strict=False).missing == ("head.bias",)


def test_a_prefix_that_the_method_adds() -> None:
    state, model = Net().state_dict(), AddsAPrefix()
    report = load(model, state)
    assert same(model.inner.state_dict(), state)
    assert any(
        "AddsAPrefix passed on 9 of 9 tensors of the checkpoint, 9 of them renamed" in note for note in report.notes
    )


def test_strict_reaches_the_method_and_what_it_passes_on_counts() -> None:
    state = {k: v for k, v in old_state().items() if k != "head.bias"} | {"other": torch.ones(1)}
    for kind in (DropsAndRenames, Delegates):
        prefix = "wrapped." if kind is Delegates else ""
        with pytest.raises(RuntimeError, match=r"head\.bias"):
            kind().load_state_dict(dict(state))
        model = kind()
        with unchanged(model), pytest.raises(sluice.MismatchError) as caught:
            load(model, state)
        assert caught.value.missing == (f"{prefix}head.bias",)
        assert caught.value.unexpected == (f"{prefix}other",)
        report = load(model, state, strict=False)
        assert (report.missing, report.unexpected) == ((f"{prefix}head.bias",), (f"{prefix}other",))


def test_shapes_are_reported_by_the_names_that_the_method_passes_on() -> None:
    state = old_state() | {"body.0.weight": torch.ones(3, 9), "head.bias": torch.ones(4)}
    assert re.search(r"(?s)different shape \(2\).*encoder.0.weight.*head.bias", problem(DropsAndRenames(), state))


def test_versions_and_extra_state_go_through_the_method() -> None:
    class Counted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

        def load_state_dict(self, state_dict: State, **options: Any) -> Any:  # type: ignore[override]
            assert state_dict._metadata["encoder.1"] == {"version": 2}  # type: ignore[attr-defined]
            return super().load_state_dict(state_dict, **options)

    model, other = Counted(), Counted()
    model.count = 5
    load(other, model.state_dict())
    assert other.count == 5
    assert same(dict(other.encoder.state_dict()), dict(model.encoder.state_dict()))


def test_only_the_override_of_the_loaded_module_counts() -> None:
    class Refuses(nn.Linear):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("too old")

    model = nn.Sequential(Refuses(2, 2))
    state = model.state_dict()
    load(model, state)
    assert re.search(r"the load_state_dict of Refuses .* ValueError: too old", problem(model[0], state, key="0"))


def test_post_hooks_run_for_the_module_that_was_called() -> None:
    calls: list[tuple[str, list[str]]] = []

    def build_hooked() -> Delegates:
        model = Delegates()
        for name, part in {"outer": model, "wrapped": model.wrapped, "head": model.wrapped.head}.items():
            part.register_load_state_dict_post_hook(lambda _, keys, n=name: calls.append((n, [*keys.missing_keys])))  # type: ignore[no-untyped-call]
        return model

    state = {k: v for k, v in old_state().items() if k != "head.bias"}
    build_hooked().load_state_dict(dict(state), strict=False)
    assert calls == [("head", ["head.bias"]), ("wrapped", ["head.bias"])]
    calls.clear()
    load(build_hooked(), state, strict=False)
    assert calls == [("head", ["head.bias"]), ("wrapped", ["head.bias"])]


def computes(self: Net, state: State) -> None:
    nn.Module.load_state_dict(self, {k: v * 2 for k, v in state.items()})


def swallows(self: Net, state: State) -> None:
    try:
        state["head.bias"] = state["head.bias"] + 1
    except Exception:  # noqa: BLE001  as foreign code does
        state.pop("other", None)
    nn.Module.load_state_dict(self, state)


def invents(self: Net, state: State) -> None:
    state["head.weight"] = torch.rand(200, 200)
    nn.Module.load_state_dict(self, state)


def sets(self: Any, state: State) -> None:
    self.loaded = [state["head.bias"]]
    nn.Module.load_state_dict(self, state)


def appends(self: Any, state: State) -> None:
    self.history["loaded"].append(state["head.bias"])
    nn.Module.load_state_dict(self, state)


def configures(self: Any, state: State) -> None:
    self.config.loaded = state["head.bias"]
    nn.Module.load_state_dict(self, state)


def resizes(self: Any, state: State) -> None:
    self.head.weight = nn.Parameter(state["head.bias"])
    nn.Module.load_state_dict(self, state)


def reorders(self: Net, state: State) -> None:
    own = self.state_dict()
    nn.Module.load_state_dict(self, {**state, "encoder.1.weight": own["encoder.1.bias"]})


def ignores(self: Net, state: State) -> None:
    pass


def adds_text(self: Net, state: State) -> None:
    nn.Module.load_state_dict(self, {**state, "note": "text"})


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (computes, r"computes with values: torch.mul .* \(test_custom_loaders_overrides.py, line \d+\)"),
        (swallows, "computes with values: torch.add"),
        (invents, "adds 'head.weight': it makes a tensor of 40,000 different values"),
        (sets, "sets the attribute 'loaded' of Own"),
        (appends, "sets the attribute 'history' of Own"),
        (configures, "changes the module or an object that it holds"),
        (resizes, "replaces tensors or parts of the module"),
        (reorders, "loads the module's own 'encoder.1.bias' as 'encoder.1.weight'"),
        (ignores, "neither calls that of nn.Module nor copies a tensor"),
        (adds_text, "adds 'note', which is not a tensor but a str"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name_and_leaves_no_trace(method: Callable[..., None], why: str) -> None:
    model = type("Own", (Net,), {"load_state_dict": method})()
    model.history, model.config = {"loaded": []}, SimpleNamespace()

    def trace() -> Any:
        return [dict(vars(part)) for part in model.modules()], str(model.history), vars(model.config).copy()

    before = trace()
    text = problem(model, Net().state_dict())
    assert re.search(why, text)
    assert "the load_state_dict of Own" in text
    assert "pass it the result of sluice.load_state_dict(file)" in text
    assert trace() == before


def test_tensors_without_a_stand_in_are_refused_by_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2).to_sparse(), requires_grad=False)

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict, assign)

    with pytest.raises(sluice.MismatchError, match="loads 'weight', which is a Parameter"):
        load(Own(), {"weight": torch.ones(2, 2)})
