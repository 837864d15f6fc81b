"""Code that ``load_state_dict`` runs: hooks, old checkpoints, and adapters, with a stand-in for peft."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sluice.matching.candidates import Candidate
from sluice.modules.following import follow_loading
from sluice.modules.load_hooks import Followed
from support.oracles import same
from support.plans import entry_of
from support.trained_net import OLD_WEIGHT_NORM, assert_equal, empty, load, problem


def follow(module: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> Followed:
    entries = {name: entry_of(tensor, i) for i, (name, tensor) in enumerate(state_dict.items())}
    return follow_loading(module, Candidate(key=None, entries=entries, versions={}, extra_state={}))


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("build", [lambda: nn.BatchNorm1d(3), lambda: empty(lambda: nn.BatchNorm1d(3))])
def test_batch_norm_without_its_counter(build: Callable[[], nn.Module], version: int | None) -> None:
    state_dict: OrderedDict[str, torch.Tensor] = OrderedDict(nn.BatchNorm1d(3).state_dict())
    del state_dict["num_batches_tracked"]
    reference = nn.BatchNorm1d(3)
    if version is not None:
        state_dict._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
    module = build()
    if version == 2:
        assert "num_batches_tracked" in problem(module, state_dict)
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            reference.load_state_dict(state_dict)
        return
    reference.load_state_dict(state_dict)
    assert load(module, state_dict).missing == ()
    assert_equal(module, reference)


def test_batch_norm_keeps_a_live_counter() -> None:
    module = nn.BatchNorm1d(3)
    module(torch.randn(4, 3))
    load(module, {n: t for n, t in nn.BatchNorm1d(3).state_dict().items() if n != "num_batches_tracked"})
    assert module.num_batches_tracked == 1


@pytest.mark.filterwarnings(OLD_WEIGHT_NORM)
def test_pre_hooks_that_rename_are_followed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    assert "0.weight_g" in old.state_dict()
    for module in (build(), empty(build)):
        load(module, old.state_dict())
        reference = build()
        reference.load_state_dict(old.state_dict())
        assert_equal(module, reference)
        assert torch.equal(module(torch.ones(3)), reference(torch.ones(3)))


def test_pre_hooks_see_and_change_what_load_state_dict_shows_them() -> None:
    seen: list[list[str]] = []

    def drop(_: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        seen.append([*state_dict])
        state_dict.pop(f"{prefix}obsolete", None)

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].register_load_state_dict_pre_hook(drop)  # type: ignore[no-untyped-call]
    state_dict = {**nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict(), "1.obsolete": torch.zeros(1)}
    load(module, state_dict)
    module.load_state_dict(state_dict)
    assert seen[0] == seen[1] == ["1.weight", "1.bias", "1.obsolete"]


def test_pre_hooks_leave_no_trace_in_the_module() -> None:
    def flag(module: Any, *_: object) -> None:
        module.flag = True

    def zero(module: Any, *_: object) -> None:
        with torch.no_grad():
            module.bias.zero_()

    def hide(module: Any, *_: object) -> None:
        with suppress(Exception):  # as foreign code does
            zero(module)

    def register(module: nn.Module, hook: Callable[..., None], kind: str) -> None:
        if kind == "module":
            module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            return
        taken: Any = MethodType(hook, module) if kind == "method" else partial(hook, module)
        module._register_load_state_dict_pre_hook(taken)  # type: ignore[no-untyped-call]

    hooks = ((flag, "flag|changes the module"), (zero, "zero_"), (hide, "zero_"))
    for hook, text in hooks:
        for kind in ("module", "method", "partial"):
            module = nn.Linear(2, 2)
            register(module, hook, kind)
            attributes, bias = dict(vars(module)), module.bias.clone()
            assert re.search(text, problem(module, nn.Linear(2, 2).state_dict())), (hook, kind)
            assert vars(module) == attributes
            assert torch.equal(module.bias, bias)


def test_pre_hooks_that_take_the_module_rename_and_set_attributes_to_tensors() -> None:
    class Renames(nn.Linear):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_load_state_dict_pre_hook(self.rename)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call]

        def rename(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
            if self.weight.shape == (2, 2) and self.weight.device.type == "cpu":
                state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")

    def take(module: Any, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        module.scale = state_dict.pop(f"{prefix}scale")

    state_dict = {"0.kernel": torch.rand(2, 2), "0.bias": torch.rand(2), "0.scale": torch.rand(1)}
    for build in (lambda: nn.Sequential(Renames()), lambda: empty(lambda: nn.Sequential(Renames()))):
        module = build()
        followed = follow(module, state_dict)
        assert followed.problems == ()
        assert [*followed.entries] == ["0.weight", "0.bias"]
        assert [*followed.attributes] == ["0.scale"]
        assert not hasattr(module[0], "scale")


def test_pre_hooks_that_take_a_lazy_module_rename_and_do_not_write() -> None:
    def rename(module: Any, state_dict: dict[str, torch.Tensor], *_: object) -> None:
        state_dict["0.weight"] = state_dict.pop("0.kernel")
        if module[1].bias is not None:
            with torch.no_grad():
                module[1].bias.zero_()

    for bias in (False, True):
        module = nn.Sequential(nn.LazyLinear(2, bias=False), nn.Linear(2, 2, bias=bias))
        module.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
        before = [tensor.clone() for tensor in module[1].parameters()]
        followed = follow(module, {"0.kernel": torch.rand(2, 3)})
        assert [*followed.entries] == ["0.weight"]
        assert len(followed.problems) == bias
        assert all(map(torch.equal, module[1].parameters(), before))


class WithAdapter(nn.Module):
    """The shape of a model of peft: a base layer, adapters by name, and a prompt that has a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config = {"default": SimpleNamespace(), "mine": SimpleNamespace()}
        self.active_adapter = "mine"
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in self.peft_config})
        self.prompt = nn.Embedding(3, 2)


def set_peft_model_state_dict(model: Any, state_dict: dict[str, Any], adapter_name: str) -> None:
    renamed = {k.replace("lora_A.", f"lora_A.{adapter_name}."): v for k, v in state_dict.items()}
    model.load_state_dict(renamed, strict=False)
    model.prompt.load_state_dict({"weight": renamed["prompt_embeddings"]})


@pytest.fixture
def _peft(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = SimpleNamespace(set_peft_model_state_dict=set_peft_model_state_dict)
    monkeypatch.setitem(sys.modules, "peft", peft)


@pytest.mark.usefixtures("_peft")
def test_an_adapter_alone_is_loaded_as_peft_does() -> None:
    state = {"lora_A.weight": torch.rand(1, 2), "prompt_embeddings": torch.rand(3, 2)}
    model = WithAdapter()
    expected = copy.deepcopy(model)
    set_peft_model_state_dict(expected, state, "mine")
    assert re.search(r"an adapter \('mine'\) without its base model.* strict=False", problem(model, state))
    report = load(model, state, strict=False)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert report.missing == ("base_layer.weight", "base_layer.bias", "lora_A.default.weight")
    assert any("set_peft_model_state_dict passed on 2 of 2 tensors" in note for note in report.notes)


class Base(nn.Module):
    """The base model, whose layers peft replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(2, 2)
        self.head: nn.Module = nn.Linear(2, 2)


class Copied(nn.Module):
    """The shape of peft's wrapper of a layer that is trained as a whole."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})


class Peft(nn.Module):
    """The shape of a model of peft around a base model."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config = {"default": SimpleNamespace(init_lora_weights=True)}
        self.base_model = Base()
        wrapper = WithAdapter()
        wrapper.base_layer = nn.Linear(2, 2)
        self.base_model.up = wrapper
        self.base_model.head = Copied(nn.Linear(2, 2))

    def get_base_model(self) -> nn.Module:
        return self.base_model


@pytest.mark.usefixtures("_peft")
@pytest.mark.parametrize("part", ["model", "base"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_base_checkpoint_is_loaded_through_the_wrappers(part: str, prefix: str) -> None:
    saved = Base().state_dict()
    model = Peft()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora" in name}
    state = {prefix + name: tensor for name, tensor in saved.items()}
    report = load(model if part == "model" else model.base_model, state)
    after = model.state_dict()
    layers = {"up.": ("up.base_layer.",), "head.": ("head.original_module.", "head.modules_to_save.default.")}
    for old, wrapped in layers.items():
        for new in wrapped:
            for name in ("weight", "bias"):
                assert torch.equal(after[f"base_model.{new}{name}"], saved[old + name])
    assert same({name: tensor for name, tensor in after.items() if "lora" in name}, before)
    assert (report.missing, report.unexpected) == ((), ())
    assert "through the wrappers of peft, without 3 tensors of adapters" in str(report)
    if part == "model":
        again = Peft()
        load(again, after)
        assert same(dict(again.state_dict()), dict(after))


@pytest.mark.usefixtures("_peft")
def test_a_checkpoint_that_does_not_fit_is_not_called_an_adapter() -> None:
    model = Peft()
    assert "it has 0 of 9 tensors" in problem(model, {"a": torch.ones(2)})
    model.peft_config["default"].init_lora_weights = "pissa"
    text = problem(model, Base().state_dict())
    assert "computed from the weights of its base model: load the base" in text
