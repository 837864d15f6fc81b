"""Methods that resume a training run: they load a model and its AdamW optimizer from one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sluice.benchmark.gpt2 import build, final_bytes, random_weight
from sluice.benchmark.records import Loaded, Method, MethodJob

__all__ = ["RESUMING", "RESUMING_REFERENCE", "Training", "make_run", "resumed_bytes"]

_READS = (".run.pt",)

#: Imported by torch when the first optimizer is created; imported before the clock starts.
_OPTIMIZER_IMPORTS = ("torch._dynamo",)

#: Number of finished steps of the run.
_STEPS = 1000.0


class Training(nn.Module):
    """A model with the tensors of its optimizer state as buffers, so that all of them are touched and compared."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        for name, parameter in model.named_parameters():
            for key, tensor in optimizer.state[parameter].items():
                self.register_buffer(f"{name}.{key}".replace(".", "_"), tensor)

    def forward(self, token_ids: torch.Tensor) -> Any:
        """Return the output of the model."""
        return self.model(token_ids)


def resumed_bytes(size: str) -> int:
    """Return F of a run in bytes: the model in fp32, and two moments and a step per parameter."""
    with torch.device("meta"):
        parameters = list(build(size).parameters())
    return final_bytes(size, torch.float32) + sum(2 * parameter.nbytes + 4 for parameter in parameters)


def make_run(path: Path, size: str) -> None:
    """Write a training checkpoint of random weights and moments, all of which is in memory meanwhile."""
    with torch.device("meta"):
        model = build(size)
        optimizer = torch.optim.AdamW(model.parameters())
    # torch fills tensors without the interpreter lock: one tensor per thread.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        weights = model.state_dict()
        filled = pool.map(lambda name: random_weight(name, weights[name].shape), weights)
        state = pool.map(lambda item: _moments(*item), model.named_parameters())
        run = {
            "model": dict(zip(weights, filled, strict=True)),
            "optimizer": {
                "state": dict(enumerate(state)),
                "param_groups": optimizer.state_dict()["param_groups"],
            },
            "step": int(_STEPS),
        }
    torch.save(run, path)


def _moments(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(_STEPS),
        "exp_avg": random_weight(f"{name}.exp_avg", parameter.shape),
        "exp_avg_sq": random_weight(f"{name}.exp_avg_sq", parameter.shape).square_(),
    }


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


def _generate(job: MethodJob) -> Loaded:
    """Return the reference: the run with the random numbers of the checkpoint, generated and not read."""
    model = build(job.model)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(random_weight(name, weight.shape))
    optimizer = _optimizer(model)
    optimizer.state.update({parameter: _moments(name, parameter) for name, parameter in model.named_parameters()})
    return Training(model, optimizer)


def _with_torch(job: MethodJob, model: nn.Module, *, mmap: bool) -> Loaded:
    """Resume as torch's tutorial does."""
    optimizer = _optimizer(model)
    run = torch.load(job.checkpoint, map_location="cpu", mmap=mmap)
    model.load_state_dict(run["model"])
    optimizer.load_state_dict(run["optimizer"])
    return Training(model, optimizer)


def _with_torch_assign(job: MethodJob, model: nn.Module) -> Loaded:
    """Resume with torch's means against copies: a meta model, mapped pages, assigned tensors."""
    run: Mapping[str, Any] = torch.load(job.checkpoint, map_location="cpu", mmap=True)
    model.load_state_dict(run["model"], assign=True)
    optimizer = _optimizer(model)
    optimizer.load_state_dict(run["optimizer"])
    return Training(model, optimizer)


def _with_sluice(job: MethodJob, model: nn.Module) -> Loaded:
    import sluice

    with sluice.open(job.checkpoint) as checkpoint:
        sluice.load_into(model, checkpoint)
        optimizer = _optimizer(model)
        sluice.load_optimizer(optimizer, checkpoint)
    return Training(model, optimizer)


def _real(job: MethodJob) -> nn.Module:
    return build(job.model)


def _on_meta(job: MethodJob) -> nn.Module:
    with torch.device("meta"):
        return build(job.model)


def _empty(job: MethodJob) -> nn.Module:
    import sluice

    with sluice.empty_init():
        return build(job.model)


def _resuming(
    name: str,
    resume: Callable[[MethodJob, nn.Module], Loaded],
    make: Callable[[MethodJob], nn.Module],
    imports: tuple[str, ...] = (),
) -> Method:
    def start(job: MethodJob) -> Callable[[], Loaded]:
        return partial(resume, job, make(job))

    return Method(name=name, start=start, imports=(*_OPTIMIZER_IMPORTS, *imports), reads=_READS)


#: Generates the reference; not a loader, so no table shows it.
RESUMING_REFERENCE = Method(
    name="resuming-reference", start=lambda job: partial(_generate, job), imports=_OPTIMIZER_IMPORTS, reads=_READS
)

#: In the order of the table.
RESUMING = (
    _resuming("torch-resume", partial(_with_torch, mmap=False), _real),
    _resuming("torch-resume-mmap", partial(_with_torch, mmap=True), _real),
    _resuming("torch-resume-assign", _with_torch_assign, _on_meta),
    _resuming(
        "sluice-resume",
        _with_sluice,
        _empty,
        imports=("sluice:empty_init", "sluice:load_into", "sluice:load_optimizer"),
    ),
)
