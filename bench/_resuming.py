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

from sluice.benchmark.gpt2 import final_bytes, gpt2, random_weight
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import Loaded, Method, MethodJob

__all__ = ["RESUMING", "RESUMING_REFERENCE", "Training", "make_run", "resumed_bytes"]

_READS = (".run.pt",)

#: Imported by torch when the first optimizer is created; imported before the clock starts.
_IMPORTS = ("torch._dynamo",)

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
        parameters = list(gpt2(size).parameters())
    return final_bytes(size, torch.float32) + sum(2 * parameter.nbytes + 4 for parameter in parameters)


def make_run(path: Path, size: str) -> None:
    """Write a training checkpoint of random weights and moments, all of which is in memory meanwhile."""
    with torch.device("meta"):
        model = gpt2(size)
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
    model = gpt2(job.model)
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
    return gpt2(job.model)


def _on_meta(job: MethodJob) -> nn.Module:
    with torch.device("meta"):
        return gpt2(job.model)


def _empty(job: MethodJob) -> nn.Module:
    import sluice

    with sluice.empty_init():
        return gpt2(job.model)


def _method(
    name: str,
    load: Callable[..., Loaded],
    build: Callable[[MethodJob], nn.Module] | None,
    imports: tuple[str, ...] = (),
) -> Method:
    return Method(name=name, load=load, build=build, imports=(*_IMPORTS, *imports, "bench._resuming"), reads=_READS)


#: Generates the reference; not a loader, so no table shows it.
RESUMING_REFERENCE = _method("resuming-reference", _generate, None)

#: In the order of the table.
RESUMING = (
    _method("torch-resume", partial(_with_torch, mmap=False), _real),
    _method("torch-resume-mmap", partial(_with_torch, mmap=True), _real),
    _method("torch-resume-assign", _with_torch_assign, _on_meta),
    _method("sluice-resume", _with_sluice, _empty, ("sluice:empty_init", "sluice:load_into", "sluice:load_optimizer")),
)

METHODS.update({method.name: method for method in (RESUMING_REFERENCE, *RESUMING)})
