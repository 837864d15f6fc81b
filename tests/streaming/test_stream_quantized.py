"""Streams of saved quantized weights: blocks are read and kept quantized, and the outputs are those of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice.modules.unloaded import ParkedParameter
from support.gguf_files import packed, plain, write
from support.quantized import CONFIGS, plain_tensors, scale_modules
from support.streamed_models import IDS, WIDTH, Adapted, Course, Layers, empty, same
from support.streamed_models import train as train_steps

COUNT = 8

_make = partial(Layers, count=COUNT)
_scale = scale_modules()


def _save(model: nn.Module, path: Path) -> None:
    """Write the plain tensors of a model, or what torch.save pickles."""
    if path.suffix == ".pth":
        torch.save(model.state_dict(), path)
        return
    save_file(plain_tensors(model), path)


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Layers:
    torch.manual_seed(0)
    found = _make().eval()
    _scale(found)
    return found


def _served() -> Layers:
    found = empty(_make)
    _scale(found)
    return found


def _course(model: Layers, loss: Callable[[nn.Module], torch.Tensor]) -> Course:
    """Train adapters of the blocks for three steps."""
    torch.manual_seed(1)
    for block in model.layers:
        block[0] = Adapted(block[0], WIDTH, WIDTH)  # type: ignore[index, operator]
    return train_steps(model, loss, steps=3)


@pytest.mark.parametrize("name", ["q.safetensors", "q.pth"])
def test_blocks_are_read_quantized(tmp_path: Path, model: Layers, name: str) -> None:
    _save(model, tmp_path / name)
    running = _served()
    before = dict(running.named_parameters())
    planned = sluice.plan(running, tmp_path / name, memory="2MiB", stream=True).stream
    with sluice.stream(running, tmp_path / name, memory="2MiB") as stream:
        held = [running.linear(number).weight for number in range(COUNT)]
        streamed = [weight for weight in held if isinstance(weight, ParkedParameter)]
        assert len(streamed) >= COUNT // 2
        assert all(weight.path.endswith(".0.weight") for weight in streamed)
        for _ in range(3):
            assert torch.equal(running(IDS), model(IDS))
        report = stream.report
        for number, weight in enumerate(held):  # those that stay, and those that are read for one operation
            assert torch.equal(weight @ torch.ones(512), model.linear(number).weight @ torch.ones(512))
    one = 512 * 512 + 512 * 4
    head = 1000 * 512 + 1000 * 4
    assert len(streamed) * one <= report.call_bytes <= len(streamed) * one + head + (64 << 10)
    assert planned is not None
    assert (planned.call_bytes, planned.resident_bytes) == (report.call_bytes, report.resident_bytes)
    after = dict(running.named_parameters())
    assert list(after) == list(before)
    assert all(after[f"layers.{number}.0.weight"] is before[f"layers.{number}.0.weight"] for number in range(COUNT))
    with sluice.stream(running, tmp_path / name, memory="3MiB"):
        assert torch.equal(running(IDS), model(IDS))
    sluice.load_into(running, tmp_path / name)
    assert torch.equal(running(IDS), model(IDS))


def test_a_tied_quantized_weight_is_read_once(tmp_path: Path, model: Layers) -> None:
    model.layers[5][0].weight = model.layers[2][0].weight  # type: ignore[index]
    _save(model, tmp_path / "q.pth")
    running = _served()
    running.layers[5][0].weight = running.layers[2][0].weight  # type: ignore[index]
    with sluice.stream(running, tmp_path / "q.pth", memory="2MiB"):
        assert running.linear(5).weight is running.linear(2).weight
        for _ in range(2):
            assert torch.equal(running(IDS), model(IDS))


def test_a_refused_stream_or_plan_leaves_the_quantized_weights(tmp_path: Path, model: Layers) -> None:
    _save(model, tmp_path / "q.safetensors")
    running = _served()
    before = dict(running.named_parameters())
    with pytest.raises(sluice.BudgetError):
        sluice.stream(running, tmp_path / "q.safetensors", memory="64KiB")
    with pytest.raises(ValueError, match="would cast the scales"):
        sluice.stream(running, tmp_path / "q.safetensors", memory="2MiB", dtype="bf16")
    with pytest.raises(ValueError, match="a stream does not quantize"):
        sluice.plan(empty(_make), tmp_path / "q.safetensors", quantize=_scale, stream=True)
    after = dict(running.named_parameters())
    assert all(after[name] is before[name] for name in before)


def test_weights_of_bitsandbytes_are_refused_by_name(tmp_path: Path, model: Layers) -> None:
    layers = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    _save(model, tmp_path / "q.safetensors")
    running = empty(_make)
    running.layers[1] = layers.Linear4bit(WIDTH, WIDTH, device="meta")
    with pytest.raises(sluice.StreamError, match=r"'layers.1' cannot be streamed: bitsandbytes"):
        sluice.stream(running, tmp_path / "q.safetensors", memory="2MiB")


@pytest.mark.parametrize(("share", "rests"), [(0.3, False), (0.6, True)])
@pytest.mark.parametrize("train", [False, True])
def test_weights_of_gguf_rest_packed(tmp_path: Path, share: float, *, rests: bool, train: bool) -> None:
    """All of them that do not stay, or as many as fit, and calls read the packed bytes of the others."""
    tensors = {name: plain(tensor) for name, tensor in _make().state_dict().items()}
    for number in range(COUNT):
        tensors[f"layers.{number}.0.weight"] = packed((WIDTH, WIDTH), seed=number)[0]
    write(tmp_path / "m.gguf", tensors)
    model = empty(_make).requires_grad_(False)
    sluice.load_into(model, tmp_path / "m.gguf")
    running = empty(_make).requires_grad_(False)
    memory = int(share * sum(each.nbytes for each in model.parameters()))
    plan = sluice.plan(running, tmp_path / "m.gguf", memory=memory, stream=True).stream
    assert plan is not None
    with (
        torch.set_grad_enabled(train),
        sluice.stream(running, tmp_path / "m.gguf", memory=memory, train=train) as stream,
    ):
        report, reads = stream.report, list[int]()
        for _ in range(3):
            before = stream.report.read_bytes
            assert torch.equal(running(IDS), model(IDS))
            reads.append(stream.report.read_bytes - before)
        if train:
            courses = [_course(each, lambda model: model(IDS).logsumexp(-1).mean()) for each in (model, running)]
            assert same(*courses)
    assert (plan.call_bytes, plan.host_bytes) == (report.call_bytes, report.host_bytes)
    assert report.memory_bytes <= memory
    assert reads[0] >= report.host_bytes > 0
    rows = IDS.numel() * WIDTH * 4
    assert report.call_bytes <= reads[2] <= report.call_bytes + rows + (64 << 10)
    assert (report.call_bytes == 0) is rests


@pytest.mark.filterwarnings("ignore:Deprecation:UserWarning")
@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_of_quantized_weights_are_trained(tmp_path: Path, config: str) -> None:
    """The bits are those of the loaded model, and no values of streamed weights wait for the backward pass."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    found: list[tuple[nn.Module, list[torch.Size]]] = []

    def loss(model: nn.Module) -> torch.Tensor:
        shapes: list[torch.Size] = []
        found.append((model, shapes))

        def note(tensor: torch.Tensor) -> torch.Tensor:
            shapes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
            result: torch.Tensor = model(IDS).logsumexp(-1).mean()
        return result

    def is_chosen(module: nn.Module, name: str) -> bool:
        kinds = (nn.Linear, nn.Embedding) if config == "int4-groups" else nn.Linear
        return isinstance(module, kinds) and name != "head"

    models = [_make().eval(), empty(_make)]
    for model in models:
        torchao.quantize_(model, CONFIGS[config](torchao), filter_fn=is_chosen)
        model.requires_grad_(False)
    sluice.save(models[0], tmp_path / "q.safetensors")
    with torch.enable_grad(), sluice.stream(models[1], tmp_path / "q.safetensors", memory="3MiB", train=True) as stream:
        courses = [_course(model, loss) for model in models]
        passing = sum(isinstance(block[0].layer.weight, ParkedParameter) for block in models[1].layers)  # type: ignore[index]
        assert stream.report.call_bytes
        with torch.inference_mode():
            assert torch.equal(models[1].eval()(IDS), models[0].eval()(IDS))
    assert same(*courses)
    counts = [sum(shape == (WIDTH, WIDTH) for shape in shapes) for model, shapes in found[:: len(found) - 1]]
    assert counts[1] <= min(counts[0], COUNT - passing)
