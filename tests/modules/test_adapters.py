"""Adapters saved without their base model, with a stand-in for peft that renames as peft does."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same


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
def test_an_adapter_alone_is_loaded_as_peft_does(tmp_path: Path) -> None:
    state = {"lora_A.weight": torch.rand(1, 2), "prompt_embeddings": torch.rand(3, 2)}
    torch.save(state, tmp_path / "f.pth")
    torch.manual_seed(0)
    expected = WithAdapter()
    set_peft_model_state_dict(expected, state, "mine")
    torch.manual_seed(0)
    model = WithAdapter()
    with pytest.raises(sluice.MismatchError, match=r"an adapter \('mine'\) without its base model.* strict=False"):
        sluice.load_into(model, tmp_path / "f.pth")
    report = sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert report.missing == ("base_layer.weight", "base_layer.bias", "lora_A.default.weight")
    assert any("set_peft_model_state_dict passed on 2 of 2 tensors" in note for note in report.notes)


@pytest.mark.usefixtures("_peft")
def test_a_whole_model_with_adapters_is_loaded_by_its_names(tmp_path: Path) -> None:
    source, model = WithAdapter(), WithAdapter()
    torch.save(source.state_dict(), tmp_path / "f.pth")
    sluice.load_into(model, tmp_path / "f.pth")
    assert same(dict(model.state_dict()), dict(source.state_dict()))
    torch.save(source.state_dict() | {"other": torch.ones(1)}, tmp_path / "g.pth")
    with pytest.raises(sluice.MismatchError, match=r"(?s)not in the module.*'other'"):
        sluice.load_into(model, tmp_path / "g.pth")


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
def test_a_base_checkpoint_is_loaded_through_the_wrappers(tmp_path: Path, part: str, prefix: str) -> None:
    saved = Base().state_dict()
    torch.save({prefix + name: tensor for name, tensor in saved.items()}, tmp_path / "f.pth")
    model = Peft()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora" in name}
    report = sluice.load_into(model if part == "model" else model.base_model, tmp_path / "f.pth")
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
        torch.save(after, tmp_path / "whole.pth")
        sluice.load_into(again, tmp_path / "whole.pth")
        assert same(dict(again.state_dict()), dict(after))


@pytest.mark.usefixtures("_peft")
def test_a_checkpoint_that_does_not_fit_is_not_called_an_adapter(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "f.pth")
    with pytest.raises(sluice.MismatchError, match="it has 0 of 9 tensors"):
        sluice.load_into(Peft(), tmp_path / "f.pth")
    torch.save(Base().state_dict(), tmp_path / "g.pth")
    model = Peft()
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(sluice.MismatchError, match="computed from the weights of its base model: load the base"):
        sluice.load_into(model, tmp_path / "g.pth")
