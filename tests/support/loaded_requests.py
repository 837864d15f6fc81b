"""Requests for tensors of a file, planned and run."""

from __future__ import annotations

from pathlib import Path

import torch

from sluice.engine.targets import Targets
from sluice.planning.memory_layout import shared_targets, single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord, Request
from sluice.sources.local import LocalFile
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
