"""Casts of weights that autograd saves, and passes in random orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sluice
from support.streamed_models import WIDTH, Checkpointed, Layers, adapt, block_bytes, empty, saved


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are cast from one dtype to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.count += result.numel()
        return result


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(ids).float().logsumexp(-1).mean()
    return result


def test_checkpointed_blocks_are_cast_as_often_as_in_memory(tmp_path: Path) -> None:
    counts = []
    memory = [saved(partial(Checkpointed, count=3), tmp_path / "model.pth"), empty(partial(Checkpointed, count=3))]
    with sluice.stream(memory[1].requires_grad_(False), tmp_path / "model.pth", memory=4 * block_bytes(), train=True):
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
    tmp_path: Path, make: type[Layers], seed: int
) -> None:
    model, running = adapt(saved(make, tmp_path / "model.pth"), ["0"]), empty(make).requires_grad_(False)
    with sluice.stream(running, tmp_path / "model.pth", memory=(3 + seed) * block_bytes(), train=True) as stream:
        want, found = list(_program(model, seed)), list(_program(adapt(running, ["0"]), seed))
        assert stream.report.call_bytes
    assert want
    assert all(map(torch.equal, want, found))
