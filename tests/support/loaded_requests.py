"""Requests for tensors of a file, planned and run."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.engine.targets import Targets
from sluice.planning.memory_layout import shared_targets, single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord, Index, Request
from sluice.sources.local import LocalFile
from support.fake_accelerator import FakeAccelerator
from support.plans import MIB, facts, index_of, write_storages
from support.running import execute


def load(
    path: Path, tensors: list[torch.Tensor], requests: list[Request], *, share: bool = False
) -> list[torch.Tensor]:
    places = write_storages(path, tensors)
    source = LocalFile(path)
    try:
        index = index_of(places, (FileRecord(path=str(path), identity=source.identity),))
        targets, views = (shared_targets if share else single_targets)(requests, index, {})
        plan = plan_load(targets, index.files, facts(cached=True), staging_bytes=MIB)
        memory = Targets(plan)
        execute(plan, [source], memory)
        return memory.tensors(views)
    finally:
        source.close()


def load_to_fake(
    source: LocalFile, index: Index, requests: list[Request], *, cores: int, seed: int
) -> list[torch.Tensor]:
    """Load requests for the device ``fake:0``, check that each byte was filled once, and close the source."""
    try:
        targets, views = single_targets(requests, index, {})
        plan = plan_load(targets, index.files, facts(cached=True, cores=cores), staging_bytes=MIB)
        fake = FakeAccelerator(seed=seed)
        finished = Targets(plan, accelerators={"fake:0": fake})
        execute(plan, [source], finished)
    finally:
        source.close()
    fake.assert_filled_once()
    return finished.tensors(views)
