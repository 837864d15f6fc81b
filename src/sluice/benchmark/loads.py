"""The work of a process that loads a model with one method, and the digest of what it loaded."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import pkgutil
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sluice.benchmark.gpt2 import GPTConfig, GPTModel
from sluice.benchmark.methods import METHODS
from sluice.benchmark.process import TIMEOUT_SECONDS, run_tasks
from sluice.benchmark.records import BenchTask, MethodJob, Outcome, Work

__all__ = ["load", "make_context", "run_job", "touch", "verdict"]

_PAGE_BYTES = 4096


def run_job(
    job: MethodJob,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    host_limit_bytes: int | None = None,
    claim_time: float = 0.0,
) -> Outcome:
    """Run a job in a fresh process and return its outcome; see ``process.run_tasks`` and ``BenchTask.claim_time``."""
    task = BenchTask(
        work=f"{__name__}:load",
        arguments={"home": METHODS[job.method].load.__module__, **dataclasses.asdict(job)},
        imports=METHODS[job.method].imports,
        claimed_bytes=2 * _size_on_disk(Path(job.checkpoint)) if job.checkpoint else 0,
        claim_time=claim_time,
        watches_device=job.device == "cuda",
    )
    (outcome,) = run_tasks([task], timeout_seconds=timeout_seconds, host_limit_bytes=host_limit_bytes)
    return dataclasses.replace(outcome, facts={}, **outcome.facts)


def _size_on_disk(path: Path) -> int:
    """Return the size of a file, or of the files in a directory, in bytes; 0 if the path does not exist."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in os.scandir(path))
    return path.stat().st_size if path.exists() else 0


def load(home: str, **job_fields: Any) -> Work:
    """Load a model with one method: the work of a ``BenchTask``. Seconds end when every weight is in place.

    Args:
        home: Module that registers the method.
        job_fields: Fields of the ``MethodJob``.

    Returns:
        Fields of an ``Outcome``: peaks of the device's memory, and the verdict if the job requested it.
    """
    import_module(home)
    job = MethodJob(**job_fields)
    method = METHODS[job.method]
    for name in method.imports:
        pkgutil.resolve_name(name)
    make_context(job.device)
    gc.collect()
    yield
    timed = method.start(job)
    yield
    loaded = timed()
    if isinstance(loaded, nn.Module):
        if job.device == "cpu":
            touch(loaded)
        else:
            torch.get_device_module(job.device).synchronize()
    yield
    facts: dict[str, Any] = {}
    if job.device != "cpu":
        module = torch.get_device_module(job.device)
        facts["device_allocated_bytes"] = module.max_memory_allocated()
        facts["device_reserved_bytes"] = module.max_memory_reserved()
    if job.verify and isinstance(loaded, nn.Module):
        facts["verdict"] = verdict(loaded)
    return facts


def make_context(device: str) -> None:
    """Trigger torch's work on first use: the lazy imports of the meta device and the accelerator's context."""
    config = GPTConfig(vocab_size=8, context_length=8, emb_dim=8, n_heads=2, n_layers=1, qkv_bias=True)
    with torch.device("meta"):
        GPTModel(config)
    touch(GPTModel(config).to(device))
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
        module.reset_peak_memory_stats()


def touch(model: nn.Module) -> float:
    """Read an element of every page of every weight and return their sum."""
    total = 0.0
    for weight in model.state_dict().values():
        if not weight.numel():
            continue
        flat = weight.flatten()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        # The last element too: a tensor that begins inside a page ends in a page that the steps can miss.
        total += float(flat[:: _PAGE_BYTES // flat.element_size()].sum()) + float(flat[-1])
    return total


def verdict(model: nn.Module) -> str:
    """Return a digest of name, dtype, shape and bytes of every weight, for comparison between processes."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        data = zlib.crc32(weight.detach().cpu().flatten().view(torch.uint8).numpy())
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {data}\n".encode())
    return digest.hexdigest()
