"""Streamed models that are trained: the bits and casts of the same steps in memory, and memory for one block."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sluice
from sluice._errors import BudgetError, ReadError, StreamError
from sluice.modules.unloaded import ParkedParameter
from sluice.streaming.stream import Stream
from support import fresh_process
from support.sources import record_reads
from support.streamed_models import WIDTH, Checkpointed, Experts, Layers, adapt, block_bytes, empty, same, saved, train
from support.watching import watch

MIB = 1 << 20
IDS = torch.tensor([[1, 2, 3, 999]])

#: Layers of ``Layers`` that get adapters.
ADAPTED = ("0",)


@contextmanager
def streamed(make: Callable[[], nn.Module], file: Path, memory: int, **options: Any) -> Iterator[tuple[Any, Stream]]:
    """Stream a frozen model for training."""
    model = empty(make).requires_grad_(False)
    with sluice.stream(model, file, memory=memory, train=True, **options) as stream:
        yield model, stream


def _loss(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    result: torch.Tensor = model(ids).float().logsumexp(-1).mean()
    return result


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Reentrant(Checkpointed):
    """The same with the older way of torch, which runs a backward pass inside of the other one."""

    reentrant = True


def normed() -> nn.Sequential:
    """Return batch norms: their buffers change in each call, and the weights of one are trained."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)))


@pytest.mark.parametrize("memory", [0.35, 0.6, 1.5])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Layers, {}),
        (partial(Layers, tied=True), {"accumulate": 2}),
        (Layers, {"autocast": True}),
        (Checkpointed, {}),
        (Checkpointed, {"autocast": True}),
        (Reentrant, {}),
    ],
)
def test_steps_are_those_of_the_model_in_memory(
    file: Path, make: Callable[[], Layers], options: dict[str, Any], memory: float
) -> None:
    model = adapt(saved(make, file), ADAPTED)
    want = train(model, _loss, **options)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with streamed(make, file, int(nbytes * memory)) as (running, stream):
        assert same(train(adapt(running, ADAPTED), _loss, **options), want)
        report = stream.report
    assert (report.call_bytes > 0) == (memory < 1)
    steps = 20 * options.get("accumulate", 1)
    assert report.read_bytes <= steps * (2 * report.call_bytes + MIB)
    if memory == 0.6:
        assert report.misses <= 1
        # What is in memory at both turns is not read again, in the first step neither.
        assert report.read_bytes <= 2 * steps * (report.call_bytes - 2 * MIB) + 3 * MIB


@pytest.mark.parametrize("trained", [["layers.5", "head"], ["head"], ["embedding"]])
def test_parameters_of_the_checkpoint_that_are_trained_stay_in_memory(file: Path, trained: list[str]) -> None:
    model = saved(Layers, file).requires_grad_(False)
    running = empty(Layers).requires_grad_(False)
    for part in trained:
        for each in (model, running):
            each.get_submodule(part).requires_grad_(True)
    want = train(model, _loss)
    with sluice.stream(running, file, memory=6 * block_bytes(), train=True) as stream:
        assert same(train(running, _loss), want)
        assert stream.report.call_bytes
    found = dict(running.named_parameters())
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or torch.equal(found[name], parameter)  # they keep what was learned
    assert not stream.report.notes
    with sluice.stream(running, file, memory=6 * block_bytes(), train=True) as stream:
        assert f"had values, and were filled from the checkpoint ({len(_trained(model))})" in stream.report.notes[0]


def test_experts_and_batch_norms(file: Path) -> None:
    x = torch.randn(4, WIDTH)
    cases: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor], tuple[str, ...]]] = [
        (Experts, lambda model: sum(model(x, each).square().mean() for each in (3, 1, 3)), ("own",)),
        (normed, lambda model: model(x).square().mean(), ("0",)),
    ]
    for make, loss, names in cases:
        model = adapt(saved(make, file), names)
        want = train(model, loss, steps=5)
        with streamed(make, file, 4 * block_bytes()) as (running, stream):
            assert same(train(adapt(running, names), loss, steps=5), want)
            assert stream.report.call_bytes
            for (name, buffer), other in zip(model.named_buffers(), running.buffers(), strict=True):
                assert torch.equal(buffer, other), name


@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_pass_holds_no_weights_and_may_be_repeated(file: Path, *, autocast: bool) -> None:
    model = adapt(saved(Layers, file), ADAPTED)
    held: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.shape)
        return tensor

    with streamed(Layers, file, 3 * block_bytes()) as (running, _):
        adapt(running, ADAPTED)
        gradients = []
        for each in (model, running):
            held.clear()
            with (
                torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            ):
                torch.manual_seed(0)
                loss = _loss(each)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
        assert WIDTH * WIDTH not in {shape.numel() for shape in held}
        # Hooks around the model get the activations, but for torch 2.6.
        assert 4 * WIDTH in {shape.numel() for shape in held} or not hasattr(
            torch._C._autograd, "_top_saved_tensors_default_hooks"
        )
    assert all(map(torch.equal, *gradients))


def test_a_failed_read_or_an_interrupt_in_a_backward_pass_leaves_the_model_usable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapt(saved(Layers, file), ADAPTED).eval()
    want = torch.autograd.grad(_loss(model), _trained(model))
    with sluice.open(file) as checkpoint, monkeypatch.context() as patch:
        (recording,) = record_reads(checkpoint)
        errors: list[ReadError] = []

        def fail(*_: object, **__: object) -> None:
            if errors:
                raise errors[0]

        watch(patch, recording, "read_into", fail)
        with streamed(Layers, checkpoint, 3 * block_bytes()) as (running, _):  # type: ignore[arg-type]
            adapt(running, ADAPTED).eval()
            loss = _loss(running)
            errors.append(ReadError("broken", file="f"))
            with pytest.raises(ReadError):
                loss.backward()  # type: ignore[no-untyped-call]
            errors.clear()
            interrupting = running.layers[3][0].up.weight.register_hook(Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                _loss(running).backward()  # type: ignore[no-untyped-call]
            interrupting.remove()
            found = torch.autograd.grad(_loss(running), _trained(running))
    assert all(map(torch.equal, want, found))


def test_what_cannot_be_right_is_refused_by_name(file: Path) -> None:
    saved(Layers, file)
    with pytest.raises(BudgetError, match=r"require gradients, so that they stay \(14\): embedding.weight"):
        sluice.stream(empty(Layers), file, memory=3 * block_bytes(), train=True)
    with streamed(Layers, file, 3 * block_bytes()) as (running, stream):
        adapt(running, ADAPTED)
        running.layers[1][0].layer.weight.requires_grad_(True)
        with pytest.raises(StreamError, match="cannot be trained") as refused:
            running(IDS)
        assert refused.value.tensor == "layers.1.0.weight"
        running.layers[1][0].layer.weight.requires_grad_(False)
        own = {name: each for name, each in running.named_parameters() if each.requires_grad}
        with pytest.raises(StreamError, match="transformed by"):
            torch.func.grad(lambda own: torch.func.functional_call(running, own, (IDS,)).sum())(own)
        loss = _loss(running)
        assert isinstance(running.layers[0][0].layer.weight, ParkedParameter)
        stream.close()
        with pytest.raises(StreamError, match=r"the stream has ended.*Close it after"):
            loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(StreamError, match="not in memory"):
            running(IDS)


_PEAK = """
import ctypes, sys, torch, sluice
from functools import partial
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: memory that is free is not counted
from sluice.testing import assert_peak
from support.streamed_models import IDS, Layers, adapt, empty
torch.set_num_threads(1)
model = empty(partial(Layers, count=160)).requires_grad_(False)
memory = sluice.MemoryLimits(host="12MiB", staging="4MiB")
with sluice.stream(model, sys.argv[1], memory=memory, train=True) as stream:
    optimizer = torch.optim.AdamW([*adapt(model, ["0"]).parameters()])
    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[2] == "autocast"):
            loss = model(IDS).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    with assert_peak(16 << 20):
        for _ in range(3):
            step()
assert stream.report.call_bytes > 140 << 20
"""


@pytest.mark.skipif(torch.__version__ < "2.7", reason="that torch starts threads when it is imported")
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("how", ["plain", "autocast"])
def test_steps_take_no_more_memory_than_the_first(file: Path, how: str) -> None:
    saved(partial(Layers, count=160), file)
    done = fresh_process.run(_PEAK, file, how)
    assert done.returncode == 0, done.stderr


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are cast from one dtype to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.count += result.numel()
        return result


def test_checkpointed_blocks_are_cast_as_often_as_in_memory(file: Path) -> None:
    counts = []
    memory = [saved(partial(Checkpointed, count=3), file), empty(partial(Checkpointed, count=3))]
    with sluice.stream(memory[1].requires_grad_(False), file, memory=4 * block_bytes(), train=True):
        for model in memory:
            adapt(model, ["0"])
            with _Casts() as casts:  # type: ignore[no-untyped-call]
                with torch.autocast("cpu", torch.bfloat16):
                    loss = _loss(model, torch.tensor([[1, 2]]))
                loss.backward()  # type: ignore[no-untyped-call]
            counts.append(casts.count)
    assert counts[0] > 6 * WIDTH * WIDTH
    head = 2 * 1000 * WIDTH  # no checkpoint is around it
    assert counts[1] <= counts[0] + head


def _program(model: nn.Module, seed: int) -> Iterator[torch.Tensor]:
    """Run passes in an order that the seed gives; yield what they compute."""
    choose, graphs = random.Random(seed), list[torch.Tensor]()
    trained = _trained(model)
    optimizer = torch.optim.AdamW(trained, 1e-2)
    torch.manual_seed(seed)
    model.train()
    for _ in range(30):
        ids = torch.tensor([[choose.randrange(1000) for _ in range(choose.randint(1, 4))]] * choose.randint(1, 3))
        match choose.choice(["forward", "forward", "backward", "backward", "evaluate", "fail", "step"]):
            case "forward":
                with torch.autocast("cpu", torch.bfloat16, enabled=choose.random() < 0.3):
                    graphs.append(_loss(model, ids))
            case "backward" if graphs:
                graph = graphs.pop(choose.randrange(len(graphs)))
                if choose.random() < 0.3:
                    graph.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                graph.backward()  # type: ignore[no-untyped-call]
                yield graph.detach()
            case "evaluate":
                with torch.inference_mode(mode=choose.random() < 0.5), torch.no_grad():
                    yield model(ids).clone()
            case "fail":
                hook = choose.choice(trained).register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]
                with suppress(ZeroDivisionError):
                    _loss(model, ids).backward()  # type: ignore[no-untyped-call]
                hook.remove()
            case "step" if not graphs:  # autograd refuses to change what a graph needs
                yield from (parameter.grad.clone() for parameter in trained if parameter.grad is not None)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("make", [Layers, Checkpointed])
@pytest.mark.parametrize("seed", range(3))
def test_random_orders_of_passes_have_the_bits_of_the_model_in_memory(
    file: Path, make: type[Layers], seed: int
) -> None:
    model, running = adapt(saved(make, file), ["0"]), empty(make).requires_grad_(False)
    with sluice.stream(running, file, memory=(3 + seed) * block_bytes(), train=True) as stream:
        want, found = list(_program(model, seed)), list(_program(adapt(running, ["0"]), seed))
        assert stream.report.call_bytes
    assert want
    assert all(map(torch.equal, want, found))
