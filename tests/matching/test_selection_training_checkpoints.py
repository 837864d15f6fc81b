"""Checkpoints of training loops: the state dict that is selected, its notes, and how to select another."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import empty


def network() -> nn.Sequential:
    stem = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32))
    return nn.Sequential(OrderedDict(stem=stem, head=nn.Linear(32, 5)))


class Lit(nn.Module):
    """A module that has the state dict of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.loss_weights = nn.Parameter(torch.ones(5))


def trained(module: nn.Module) -> torch.optim.Optimizer:
    """Train a module for two steps; return its optimizer."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    inner = module.model if isinstance(module, Lit) else module
    for _ in range(2):
        optimizer.zero_grad()
        inner(torch.randn(8, 24)).square().sum().backward()
        optimizer.step()
    return optimizer


def scheduler_of(optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    state: Mapping[str, Any] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict()
    return state


def basic(net: nn.Module) -> dict[str, Any]:
    """Return a checkpoint in the layout of torch's tutorials."""
    optimizer = trained(net)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler_of(optimizer),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
        "loss": torch.tensor(0.25),
        "rng_state": torch.get_rng_state(),
    }


def lightning(lit: nn.Module) -> dict[str, Any]:
    """Return a checkpoint of Lightning 2 with callbacks that hold tensors, and hyperparameters."""
    optimizer = trained(lit)
    best = "/runs/version_0/checkpoints/epoch=1-step=20.ckpt"
    return {
        "epoch": 1,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": lit.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.state_dict": {"_batches_that_stepped": 20}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_loss', 'every_n_epochs': 1}": {
                "best_model_score": torch.tensor(0.3),
                "best_k_models": {best: torch.tensor(0.3), best.replace("1", "2"): torch.tensor(0.4)},
            },
            "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": {"best_score": torch.tensor(0.3)},
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler_of(optimizer)],
        "hyper_parameters": {"lr": 0.1, "widths": [24, 32], "model": {"dropout": 0.0}},
    }


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


def write(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(("build", "key", "whole"), [(basic, "model", network), (lightning, "state_dict", Lit)])
def test_the_state_dict_is_found_and_reported(
    tmp_path: Path, build: Callable[[nn.Module], dict[str, Any]], key: str, whole: Callable[[], nn.Module]
) -> None:
    module = whole()
    content = build(module)
    path = write(tmp_path / "run.ckpt", content)
    assert same(dict(sluice.load_state_dict(path)), weights(module))
    target = empty(whole)
    report = sluice.load_into(target, path)
    assert (report.key, report.prefix) == (key, "")
    assert repr(key) in str(report)
    assert same(weights(target), weights(module))


def test_a_lightning_checkpoint_fills_the_model_inside(tmp_path: Path) -> None:
    lit = Lit()
    path = write(tmp_path / "epoch=1-step=20.ckpt", lightning(lit))
    net = empty(network)
    report = sluice.load_into(net, path)
    assert (report.key, report.prefix) == ("state_dict", "model.")
    assert any("1 tensors of the checkpoint outside 'model.'" in note for note in report.notes)
    assert same(weights(net), weights(lit.model))
    assert sluice.load_optimizer(torch.optim.AdamW(lit.parameters()), path).key == "optimizer_states.0"


def test_a_checkpoint_of_old_lightning_whose_callbacks_have_classes_as_keys(tmp_path: Path) -> None:
    net = network()
    callbacks = {nn.ConvTranspose3d: {"best": torch.ones(3)}, nn.LazyConvTranspose3d: {"best": torch.ones(3)}}
    path = write(tmp_path / "sd.ckpt", {"state_dict": net.state_dict(), "callbacks": callbacks})
    target = empty(network)
    assert sluice.load_into(target, path).key == "state_dict"
    assert same(weights(target), weights(net))
    with sluice.open(path) as checkpoint:  # the names of both classes end alike
        assert "callbacks.torch.nn.modules.conv.LazyConvTranspose3d.best" in checkpoint


def test_two_state_dicts_are_an_error_that_lists_them(tmp_path: Path) -> None:
    content = basic(network())
    content["average"] = {name: tensor + 1 for name, tensor in content["model"].items()}
    path = write(tmp_path / "run.pt", content)
    target = empty(network)
    with pytest.raises(sluice.MismatchError) as caught:
        sluice.load_into(target, path)
    assert listed(caught.value) == ["model", "average"]
    assert all(parameter.is_meta for parameter in target.parameters())
    with pytest.raises(sluice.MismatchError) as caught:
        sluice.load_state_dict(path)
    assert listed(caught.value) == ["model", "average"]
    assert "9 tensors, 4.28 KiB" in str(caught.value)
    for key in listed(caught.value):
        assert same(dict(sluice.load_state_dict(path, key=key)), dict(content[key]))
        assert sluice.load_into(target, path, key=key).key == key
        assert same(weights(target), dict(content[key]))


def listed(error: sluice.SluiceError) -> list[str]:
    """Return the keys that an error suggests."""
    return re.findall(r"key='([^']+)'", str(error))


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_the_keys_that_an_error_offers_can_be_used(tmp_path: Path, wrapper: str) -> None:
    teacher, student = network(), network()
    both = {**prefixed("teacher.", teacher), **prefixed("student.", student)}
    compiled = {wrapper + name.replace("stem.", "stem._orig_mod."): tensor for name, tensor in both.items()}
    path = write(tmp_path / "f.ckpt", {"state_dict": compiled, "epoch": 1})
    target = empty(network)
    with pytest.raises(sluice.MismatchError, match="more than one part") as caught:
        sluice.load_into(target, path)
    assert "choose one with key= (--key)" in str(caught.value)
    found = []
    for key in listed(caught.value):
        sluice.load_into(target, path, key=key)
        found += [net for net in (teacher, student) if same(weights(target), weights(net))]
    assert set(found) == {teacher, student}


def prefixed(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def test_an_optimizer_alone_is_not_a_state_dict_of_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "optimizer.bin", trained(network()).state_dict())
    with pytest.raises(sluice.MismatchError, match="no"):
        sluice.load_state_dict(path)
    with pytest.raises(sluice.MismatchError, match="no named tensors to load into a module"):
        sluice.load_into(empty(network), path)


def test_scalars_by_name_are_a_state_dict_if_there_is_no_other_or_a_module_of_them(tmp_path: Path) -> None:
    scale = write(tmp_path / "scale.pt", {"scales": {"a": torch.tensor(1.0)}, "epoch": 1})
    assert sluice.load_state_dict(scale)["a"].item() == 1.0
    path = write(tmp_path / "f.pt", {"net": network().state_dict(), "scale": {"log_scale": torch.tensor(0.25)}})
    target = empty(lambda: nn.ParameterDict({"log_scale": torch.tensor(0.5)}))
    assert sluice.load_into(target, path).key == "scale"
    assert weights(target)["log_scale"].item() == 0.25


def test_a_second_model_of_accelerate_is_reported_as_omitted(tmp_path: Path) -> None:
    write(tmp_path / "pytorch_model.bin", network().state_dict())
    write(tmp_path / "pytorch_model_1.bin", nn.Linear(3, 2).state_dict())
    assert any("pytorch_model_1.bin" in note for note in sluice.load_into(empty(network), tmp_path).notes)


@pytest.mark.parametrize("key", ["config", "hparams", "run.hyper_parameters"])
def test_a_tensor_among_settings_is_no_state_dict(tmp_path: Path, key: str) -> None:
    net = network()
    settings: dict[str, Any] = {"class_weights": torch.ones(10)}
    for part in reversed(key.split(".")):
        settings = {part: settings}
    path = write(tmp_path / "run.pt", {**settings, "model_state_dict": net.state_dict()})
    assert sluice.load_state_dict(path).keys() == net.state_dict().keys()
    assert sluice.load_state_dict(path, key=key).keys() == {"class_weights"}
    with pytest.raises(sluice.MismatchError, match=r"is not a state dict.*found a tensor"):
        sluice.load_state_dict(path, key=f"{key}.class_weights")
    assert sluice.load_state_dict(write(tmp_path / "settings.pt", settings)).keys() == {"class_weights"}
