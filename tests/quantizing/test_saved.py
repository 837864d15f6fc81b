"""Saved quantized weights: loads into models that were quantized on the meta device, and saves in torchao's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from support.directories import write_pickled_shards
from support.hf_comparing import assert_same_tensor, assert_same_weights
from support.quantized import CONFIGS, Scaled, plain_tensors, scale_modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 32, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(values)))  # type: ignore[no-any-return]


def quantized_on_meta() -> Net:
    with torch.device("meta"):
        model = Net()
    scale_modules()(model)
    return model


def saved(path: Path) -> Net:
    """Write a quantized model: its plain tensors, or as torch.save pickles it, in one file or shards; return it."""
    model = Net()
    scale_modules()(model)
    if path.suffix == ".bin":
        path.mkdir()
        write_pickled_shards(path, model.state_dict())
    elif path.suffix == ".pth":
        torch.save({"step": 3, "model": model.state_dict()}, path)
    else:
        save_file(plain_tensors(model), path)
    return model


@pytest.mark.parametrize("name", ["q.safetensors", "q.pth", "q.bin"])
def test_the_plain_tensors_of_quantized_weights_are_filled(tmp_path: Path, name: str) -> None:
    expected = saved(tmp_path / name)
    model = quantized_on_meta()
    planned = sluice.plan(model, tmp_path / name)
    assert type(model.up.weight.data) is Scaled
    assert model.up.weight.is_meta
    report = sluice.load_into(model, tmp_path / name)
    assert_same_weights(model, expected)
    assert report.final_bytes == planned.final_bytes == 128 * 64 + 128 * 32 + 4 * (128 + 32 + 3 * 128)
    assert isinstance(model.up.weight, nn.Parameter)
    assert not model.up.weight.requires_grad


def test_tied_quantized_weights_stay_tied(tmp_path: Path) -> None:
    expected = saved(tmp_path / "q.safetensors")
    model = quantized_on_meta()
    model.up.add_module("again", nn.Linear(64, 128, bias=False, device="meta"))
    twin = model.up.get_submodule("again")
    tied: Any = model.up.weight
    twin.register_parameter("weight", tied)
    sluice.load_into(model, tmp_path / "q.safetensors")
    assert_same_tensor("again", twin.get_parameter("weight"), expected.up.weight)
    assert twin.get_parameter("weight") is model.up.weight


def test_a_failure_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"up.bias": torch.ones(128)}, tmp_path / "other.safetensors")
    saved(tmp_path / "q.safetensors")
    model = quantized_on_meta()
    before = dict(model.named_parameters())
    with pytest.raises(sluice.MismatchError, match="_weight_integers"):
        sluice.load_into(model, tmp_path / "other.safetensors")
    monkeypatch.setattr("sluice.quantizing.saved.assemble", Mock(side_effect=[torch.ones(1), KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        sluice.load_into(model, tmp_path / "q.safetensors")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_casts_and_live_quantized_models_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match="would cast the scales"):
        sluice.load_into(quantized_on_meta(), tmp_path / "q.safetensors", dtype="bf16")
    with pytest.raises(sluice.MismatchError, match="cannot be loaded"):
        sluice.load_into(model, tmp_path / "q.safetensors")


@pytest.mark.parametrize(
    "verb", [sluice.load_state_dict, sluice.shared, lambda path, **options: sluice.convert(path, "b.pth", **options)]
)
def test_the_scales_of_a_file_are_not_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = {
        "a.b": '{"_type":"Int8Tensor","_data":{}}',
        "a.c": '{"_type": "Tensor"}',
        "tensor_names": '["a.b", "a.c"]',
    }
    save_file({"a._b_scale": torch.full((4,), 0.1), "a.c": torch.ones(2)}, "q.safetensors", metadata=metadata)
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    with pytest.raises(sluice.MismatchError, match="would cast the scales"):
        verb("q.safetensors", dtype="bf16")
    verb("q.safetensors", dtype="float32")  # their own dtype


@pytest.fixture(scope="module")
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def on_meta(torchao: Any, config: object) -> Net:
    with torch.device("meta"):
        model = Net()
    torchao.quantize_(model, config)
    return model


LONG = {"float8", "int4-groups"}
EACH = pytest.mark.parametrize(
    "config", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CONFIGS]
)


@pytest.mark.filterwarnings("ignore:Deprecation:UserWarning")
@EACH
def test_torchao_reads_what_is_saved_and_the_other_way_round(tmp_path: Path, torchao: Any, config: str) -> None:
    layout = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    model = Net()
    torchao.quantize_(model, CONFIGS[config](torchao))
    sluice.save(model, tmp_path / "ours.safetensors")
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        metadata = file.metadata()
    state, left = layout.unflatten_tensor_state_dict(load_file(tmp_path / "ours.safetensors"), metadata)
    assert not left
    theirs = on_meta(torchao, CONFIGS[config](torchao))
    theirs.load_state_dict(state, assign=True)
    assert_same_weights(theirs, model)
    tensors, described = layout.flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=described)
    ours = on_meta(torchao, CONFIGS[config](torchao))
    sluice.load_into(ours, tmp_path / "theirs.safetensors")
    assert_same_weights(ours, model)
    values = torch.randn(3, 64)
    assert torch.equal(ours(values), model(values))


@pytest.mark.filterwarnings("ignore:Deprecation:UserWarning")
@EACH
def test_pickled_weights_of_torchao(tmp_path: Path, torchao: Any, config: str) -> None:
    model = Net()
    torchao.quantize_(model, CONFIGS[config](torchao))
    torch.save(model.state_dict(), tmp_path / "q.pth")
    ours = on_meta(torchao, CONFIGS[config](torchao))
    sluice.load_into(ours, tmp_path / "q.pth")
    assert_same_weights(ours, model)
    other = next(name for name in CONFIGS if name != config)
    refused = on_meta(torchao, CONFIGS[other](torchao))
    with pytest.raises(sluice.MismatchError, match=r"'up\.weight' is \w+ in the module, a different torchao"):
        sluice.load_into(refused, tmp_path / "q.pth")


def test_saves_of_quantized_weights_that_are_refused(tmp_path: Path, torchao: Any) -> None:
    model = Net()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(sluice.SaveError, match=r"as \.safetensors"):
        sluice.save(model, tmp_path / "q.pth")
    with pytest.raises(sluice.SaveError, match="would cast the scales"):
        sluice.save(model, tmp_path / "q.safetensors", dtype="bf16")
    with pytest.raises(sluice.SaveError, match="name of a module"):
        sluice.save(model.down, tmp_path / "q.safetensors")
    with pytest.raises(sluice.SaveError, match="name of a module"):
        sluice.save({1: model.down.weight}, tmp_path / "q.safetensors")  # type: ignore[dict-item]
    for state in (
        {"a.b": model.down.weight, "a._b_qdata": torch.ones(1)},
        {"a._b_qdata": torch.ones(1), "a.b": model.down.weight},
    ):
        with pytest.raises(sluice.SaveError, match=r"'a._b_qdata': quantized data would have the name"):
            sluice.save(state, tmp_path / "q.safetensors")
    assert not list(tmp_path.iterdir())


def test_other_and_damaged_descriptions_are_mismatches(tmp_path: Path, torchao: Any) -> None:
    model = Net()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    sluice.save(model, tmp_path / "q.safetensors")
    with sluice.open(tmp_path / "q.safetensors") as checkpoint:
        metadata = dict(checkpoint.metadata)
    other_settings = json.dumps({**json.loads(metadata["up.weight"]), "_data": {}})
    for text in ("{", "[" * 100_000, "[]", json.dumps({"_type": "os.system", "_data": "true"}), other_settings):
        save_file(load_file(tmp_path / "q.safetensors"), tmp_path / "d.safetensors", {**metadata, "up.weight": text})
        other = on_meta(torchao, torchao.Int8WeightOnlyConfig())
        with pytest.raises(sluice.MismatchError, match=r"'up\.weight' is Int8Tensor .* in the checkpoint") as caught:
            sluice.load_into(other, tmp_path / "d.safetensors")
        assert "with the configuration" in caught.value.advice
