"""The measured process: ``python -m sluice.benchmark.child JOB``, started by ``process`` only.

Protocol: one JSON object per line. ``ready`` after imports and context creation, ``built`` when the empty model exists,
``loaded`` after every weight was touched, ``verified`` with the digests, or ``failed``. After the first three it waits
for a line, so that its parent can measure it while it is idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import mmap
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from typing import IO

import torch
from torch import nn

from sluice.benchmark.gpt2 import GPTConfig, GPTModel
from sluice.benchmark.machine import free_memory_bytes
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob, Verdict
from sluice.benchmark.subjects import is_builtin
from sluice.machine.peaks import restart_peak

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20

#: Approximate number of logits in a verdict.
_SAMPLED_LOGITS = 500


def main(import_seconds: float = 0.0) -> None:
    """Run one job and report the result.

    Args:
        import_seconds: Time of the method's imports, which the caller has measured before anything of sluice was
            imported.
    """
    # Output of libraries must not mix with the lines of the protocol.
    protocol = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _prefer_for_oom_kill()

    def say(event: str, **fields: object) -> None:
        protocol.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        _serve(MethodJob(**json.loads(sys.argv[1])), say, sys.stdin, import_seconds)
    except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the parent shows it in a row
        say("failed", reason=f"{type(error).__name__}: {error}")


def _serve(job: MethodJob, say: Callable[..., None], answers: IO[str], import_seconds: float) -> None:
    method = METHODS[job.method]
    try:
        for name in method.imports:
            pkgutil.resolve_name(name)
    except ImportError as error:
        say("absent", reason=f"{error}; pip install {method.package}" if method.package else str(error))
        return
    make_context(job.device, job.device_limit_bytes)
    gc.collect()
    if job.claim_memory:
        _touch_free_memory(2 * _size_on_disk(job.checkpoint))  # last, because the effect is short
    say("ready", peak_was_reset=restart_peak())
    answers.readline()
    begin = time.perf_counter()
    timed = method.start(job)
    say("built", build_seconds=time.perf_counter() - begin, import_seconds=import_seconds)
    answers.readline()
    begin = time.perf_counter()
    loaded = timed()
    if isinstance(loaded, nn.Module):
        _finish(loaded, job.device)
    seconds = time.perf_counter() - begin
    say("loaded", seconds=seconds, **_device_peaks(job.device))
    answers.readline()
    if job.verify and isinstance(loaded, nn.Module):
        say("verified", verdict=dataclasses.asdict(verdict(loaded, with_logits=is_builtin(job.model))))
    elif job.verify:
        say("nothing to verify")


def _prefer_for_oom_kill() -> None:
    """Make this process the first that the kernel kills when memory runs out, so that the comparison continues."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:  # not in every container
        stream.write("1000")


def _size_on_disk(path: str) -> int:
    """Return the size of a file, or of the files in a directory, in bytes; 0 if the path does not exist."""
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path))
    return os.path.getsize(path) if os.path.exists(path) else 0


def _touch_free_memory(nbytes: int) -> None:
    """Touch this much memory and free it.

    A virtual machine returns freed memory to its host, and the next touch of such a page takes ten times as long.
    Without this, a method would pay for memory that the method before it did not use. The effect lasts two seconds:
    then the kernel returns the memory again.
    """
    available = free_memory_bytes() * 3 // 4  # leaves room under a memory limit
    if not nbytes or not available:
        return
    with mmap.mmap(-1, min(nbytes, available), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, len(mapping), _HUGE_PAGE_BYTES):
            mapping[page] = 1


def make_context(device: str, limit_bytes: int | None = None) -> None:
    """Trigger torch's work on first use: the lazy imports of the meta device and the accelerator's context."""
    config = GPTConfig(vocab_size=8, context_length=8, emb_dim=8, n_heads=2, n_layers=1, qkv_bias=True)
    with torch.device("meta"):
        GPTModel(config)
    touch(GPTModel(config).to(device))
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
        if limit_bytes is not None:
            module.set_per_process_memory_fraction(min(1.0, limit_bytes / module.mem_get_info()[1]))
        module.reset_peak_memory_stats()


def _device_peaks(device: str) -> dict[str, int]:
    if device == "cpu":
        return {"device_allocated_bytes": 0, "device_reserved_bytes": 0}
    module = torch.get_device_module(device)
    return {
        "device_allocated_bytes": module.max_memory_allocated(),
        "device_reserved_bytes": module.max_memory_reserved(),
    }


def _finish(model: nn.Module, device: str) -> None:
    """Wait until every weight is in place; on the host, touch every page."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    else:
        touch(model)


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


def verdict(model: nn.Module, *, with_logits: bool = True) -> Verdict:
    """Return a digest of the bits of all weights, and the logits on a fixed input if the model takes token ids."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {_sum_of_bits(weight)}\n".encode())
    if not with_logits:
        return Verdict(weights=digest.hexdigest(), logits=())
    first = next(model.parameters())
    with torch.no_grad():
        logits = model.eval()(torch.arange(16, device=first.device).unsqueeze(0)).float().cpu().flatten()
    step = math.ceil(len(logits) / _SAMPLED_LOGITS)
    return Verdict(weights=digest.hexdigest(), logits=tuple(logits[::step].tolist()))


def _sum_of_bits(weight: torch.Tensor) -> int:
    # Eight bytes at a time, as wrapping integers: no temporary, and independent of the order of addition.
    raw = weight.detach().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # an unaligned view cannot be viewed as larger integers
    whole = len(raw) // 8 * 8
    return int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())


if __name__ == "__main__":
    main()
