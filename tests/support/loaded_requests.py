"""Requests for tensors of a file, planned and run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from msgspec.structs import replace

from sluice.engine.targets import Targets
from sluice.planning.memory_layout import shared_targets, single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord, Request
from sluice.sources.local import LocalFile
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, facts, index_of, write_storages
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
    """
    places = write_storages(path, list(tensors), shift=shift)
    with closing(LocalFile(path)) as source:
        index = index_of(places, (FileRecord(path=source.path, identity=source.identity),))
        if swap_bytes:
            swapped = zip(index.storages, swap_bytes, strict=True)
            index = replace(index, storages=tuple(replace(each, swap_bytes=nbytes) for each, nbytes in swapped))
        targets, views = (shared_targets if share else single_targets)(requests, index, {})
        plan = plan_load(targets, index.files, facts(cached=cached, cores=cores), staging_bytes=MIB)
        memory = Targets(plan, existing, accelerators={"fake:0": fake} if fake else {})
        execute(plan, [source], memory)
    if fake:
        fake.assert_filled_once()
    return memory.tensors(views)
