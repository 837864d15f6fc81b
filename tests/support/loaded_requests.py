"""Requests for tensors of a file, planned and run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from sluice.engine.targets import Targets
from sluice.records import Request
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, Stored, facts
from support.running import execute


def load(
    path: Path,
    tensors: Sequence[torch.Tensor],
    requests: list[Request],
    *,
    shift: int = 0,
    swap_bytes: Sequence[int] = (),
    share: bool = False,
    cached: bool = True,
    existing: dict[int, torch.Tensor] | None = None,
    fake: FakeAccelerator | None = None,
    cores: int = 2,
    staging: int = MIB,
) -> list[torch.Tensor]:
    """Write the storages of tensors to a file, and return the tensors of requests for them.

    Args:
        path: The file.
        tensors: Tensors with one storage each.
        requests: What to read.
        shift: Bytes from a multiple of 64 to the first of each storage.
        swap_bytes: Bytes of the numbers of each storage that are in the other order.
        share: Whether views of the same bytes share memory.
        cached: Whether the file counts as cached.
        existing: Memory of some requests.
        fake: The device ``fake:0``; each of its bytes was filled once.
        cores: Processors of the machine.
        staging: Bytes of all staging buffers.
    """
    with Stored(path, list(tensors), shift=shift) as stored:
        if swap_bytes:
            swapped = zip(stored.index.storages, swap_bytes, strict=True)
            storages = tuple(replace(each, swap_bytes=nbytes) for each, nbytes in swapped)
            stored.index = replace(stored.index, storages=storages)
        plan, views = stored.plan_of(requests, facts(cached=cached, cores=cores), staging=staging, share=share)
        memory = Targets(plan, existing, accelerators={"fake:0": fake} if fake else {})
        execute(plan, [stored.source], memory)
    if fake:
        fake.assert_filled_once()
    return memory.tensors(views)
