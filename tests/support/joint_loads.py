"""Loads of a model of DTensors by the ranks of a group, with a fault on one of them at a chosen step."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.divided_models import mesh_of
from support.gguf_files import packed, plain, write
from support.watching import watch

# The functions that run on ranks import torch.distributed.tensor, which takes as long as all of torch.
# mypy: disable-error-code="no-untyped-call"

#: Steps at which a fault can happen.
STEPS = ("open", "plan", "first read", "later read", "before the vote", "install")


class Net(nn.Module):
    """Divided and replicated weights, a buffer, and one weight large enough for a read of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1024)
        self.second = nn.Linear(1024, 7)
        self.third = nn.Linear(512, 1024, bias=False)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("scale", torch.ones(3))


def truth() -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoint."""
    torch.manual_seed(7)
    return {name: torch.randn(tensor.shape) for name, tensor in Net().state_dict().items()}


def saved(path: str) -> str:
    """Write the checkpoint."""
    torch.save(truth(), path)
    return path


def sharded(device: str, mesh: Any = None) -> nn.Module:
    """Return a fully sharded model on a device, over all ranks or a mesh."""
    from torch.distributed.fsdp import fully_shard

    with torch.device(device):
        model = Net()
    fully_shard(model, mesh=mesh or mesh_of(torch.distributed.get_world_size()))
    return model


def load(path: str, device: str = "meta", **arguments: Any) -> tuple[sluice.LoadReport, bool]:
    """Load; return the report, and whether every local tensor is right."""
    model = sharded(device)
    report = sluice.load_into(model, path, **arguments)
    return report, is_loaded(model)


def load_cached(url: str, directory: str) -> bool:
    """Load a model through a cache, of which two ranks hold each part; return whether every tensor is right."""
    model = sharded("meta", mesh_of(2, 2, names=("replicas", "shards")))
    sluice.load_into(model, sluice.Remote(url, cache=directory))
    return is_loaded(model)


def saved_packed(path: str) -> str:
    """Write a GGUF file, whose weights are packed."""
    tensors = {
        name: packed(one.shape)[0] if one.dim() == 2 else plain(torch.ones_like(one)) for name, one in truth().items()
    }
    write(Path(path), tensors)
    return path


def load_packed(path: str) -> bool:
    """Load a GGUF file; return whether every tensor is the one that is read alone."""
    model = sharded("meta")
    sluice.load_into(model, path)
    return is_loaded(model, sluice.load_state_dict(path))


def load_part(path: str, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Load a model that only some ranks hold; return the ranks of the report, and None on the others."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", list(ranks))
    if torch.distributed.get_rank() not in ranks:
        return None
    report = sluice.load_into(sharded("meta", mesh), path)
    return tuple(each.rank for each in report.ranks)


def is_loaded(model: nn.Module, expected: Mapping[str, torch.Tensor] | None = None) -> bool:
    """Return whether the full tensors are these, or those of the checkpoint; every rank has to call it."""
    found = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    return all(torch.equal(found[name], tensor) for name, tensor in (expected or truth()).items())


def state_after(path: str, step: str, fault: str, culprit: int) -> tuple[str, str, dict[int, str], str]:
    """Load with a fault on one rank; a rank that was stopped continues when another one has given up.

    Returns:
        Kind of the error, its text, failures by rank, and kind of its cause.
    """
    model = sharded("meta")
    processes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(processes, os.getpid())
    fails = torch.distributed.get_rank() == culprit
    kind = text = cause = ""
    failed: dict[int, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            inject(patch, step, fault)
        try:
            sluice.load_into(model, path)
        except BaseException as error:  # noqa: BLE001  the test judges it
            kind, text, cause = type(error).__name__, str(error), type(error.__cause__).__name__
            failed = getattr(error, "ranks", {})
    if step != "install":
        assert all(tensor.is_meta for tensor in model.parameters()), "touched"
    if fault == "stop" and not fails:
        os.kill(processes[culprit], signal.SIGCONT)
    return kind, text, failed, cause


def failing_load(path: str, step: str, fault: str, culprit: int) -> tuple[str, str, dict[int, str], str, bool]:
    """Load with a fault on one rank, and then once more without; the last value says whether that worked."""
    return *state_after(path, step, fault, culprit), load(path)[1]


def inject(patch: pytest.MonkeyPatch, step: str, fault: str) -> None:
    """Make this process fail at a step of its next load."""
    from sluice.engine import session, targets
    from sluice.loading import joint, module_fill, module_job

    def fail(*_: object, **__: object) -> Any:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        errors = {"error": OSError("the disk is on fire"), "interrupt": KeyboardInterrupt(), "memory": MemoryError()}
        raise errors[fault]

    reads = itertools.count(1)

    def nth_read(*_: object) -> None:
        if next(reads) == (1 if step == "first read" else 2):
            fail()

    if step == "open":
        patch.setattr("sluice.checkpoint.open_checkpoint.open_layout", fail)
    elif step == "plan":
        patch.setattr(joint, "_proposal", fail)
    elif "read" in step:
        patch.setattr(
            "sluice.reading.transfer.run_small",
            lambda plan, sources, targets, **calls: session.Session(sources).start(plan, targets).wait(**calls),
        )
        patch.setattr(targets.Targets, "read_straight", lambda *_: False)
        watch(patch, session.Session, "_fetch", nth_read)
    elif step == "before the vote":
        complete = module_fill.ModuleData
        patch.setattr(module_fill, "ModuleData", lambda **values: fail() or complete(**values))
    else:
        patch.setattr(module_job, "install_tensors", fail)


def live_failing_load(path: str, culprit: int) -> tuple[str, tuple[str, ...], tuple[str, ...], list[int]]:
    """Load into a live model with a fault on one rank.

    Returns:
        Kind of the cause of the ``PartialLoadError``, the names done and torn, and the ranks that failed.
    """
    model = sharded("cpu")
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == culprit:
            inject(patch, "later read", "error")
        try:
            sluice.load_into(model, path)
        except sluice.RankError as error:
            cause = error.__cause__
            assert isinstance(cause, sluice.PartialLoadError), repr(cause)
            return type(cause.__cause__).__name__, cause.done, cause.torn, sorted(error.ranks)
    raise AssertionError("no error")


def load_differently(paths: list[str], arguments: list[dict[str, Any]]) -> dict[int, str]:
    """Load, each rank with a path and arguments of its own; return the failures by rank."""
    rank = torch.distributed.get_rank()
    model = sharded("meta")
    try:
        sluice.load_into(model, paths[rank], **arguments[rank])
    except sluice.RankError as error:
        assert all(tensor.is_meta for tensor in model.parameters())
        return error.ranks
    return {}


def with_options(values: dict[str, float], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with changed options of sluice in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"sluice._defaults.{name}", value)
        return function(*arguments)
