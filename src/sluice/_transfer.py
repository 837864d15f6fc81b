"""The one path from requests to finished tensors: locate, lay out, ask the machine, plan, check the budget, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sluice._engine import Outcome, execute
from sluice._facts import host_headroom, machine_facts
from sluice._layout import View, shared_targets, single_targets
from sluice._options import MemoryLimits, PageCache
from sluice._planner import check_budget, plan_load
from sluice._records import LoadPlan, Request
from sluice._targets import Targets
from sluice._units import parse_bytes

if TYPE_CHECKING:
    from sluice._checkpoint import Checkpoint

__all__ = ["Prepared", "prepare", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan, checked against the budget, and the views that the requests asked for."""

    #: What the engine will do.
    plan: LoadPlan
    #: One finished tensor for each request.
    views: tuple[View, ...]


def prepare(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    *,
    share_storages: bool = False,
    memory: MemoryLimits | None = None,
    page_cache: PageCache = "auto",
) -> Prepared:
    """Plan the transfer of ``requests`` without reading tensor data.

    Args:
        checkpoint: Where the entries come from.
        requests: What is wanted.
        share_storages: Whether views of the same bytes share memory, as in the file.
        memory: How much memory may grow; None for the defaults.
        page_cache: How the page cache is used.

    Raises:
        BudgetError: The plan cannot keep the limits.
        CheckpointError: A header that belongs to the wanted data is damaged.
    """
    memory = memory or MemoryLimits()
    offsets = checkpoint.locate({request.entry.storage for request in requests if request.entry.numel})
    lay_out = shared_targets if share_storages else single_targets
    targets, views = lay_out(requests, checkpoint.index, offsets)
    plan = plan_load(
        targets,
        checkpoint.index.files,
        machine_facts(checkpoint.sources),
        staging_bytes=parse_bytes(memory.staging),
        page_cache=page_cache,
    )
    if memory.host is None:
        check_budget(plan, *host_headroom(plan.facts))
    else:
        check_budget(plan, parse_bytes(memory.host), "MemoryLimits(host=...)")
    return Prepared(plan=plan, views=views)


def run(
    checkpoint: Checkpoint,
    prepared: Prepared,
    targets: Targets,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> tuple[list[torch.Tensor], Outcome]:
    """Run a plan and return one tensor for each request.

    Args:
        checkpoint: Where the bytes come from.
        prepared: What to do.
        targets: The plan's final memory.
        progress: Called with the bytes read so far.
        completed: Called with the position of each target as soon as it is whole.
    """
    outcome = execute(prepared.plan, checkpoint.sources, targets, progress=progress, completed=completed)
    return targets.tensors(prepared.views), outcome
