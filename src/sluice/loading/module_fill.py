"""Fills a module as ``_module_plan`` decided: from a checked job to filled tensors in their places.

Copies of tied tensors are compared, then the data is read, and only then does a module on meta change. Live tensors
change while they are read; a failure there says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sluice._dtypes import ITEM_BYTES
from sluice._errors import MismatchError, PartialLoadError
from sluice._geometry import contiguous_stride
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.session import RunResult
from sluice.engine.targets import Targets
from sluice.entries import tree as _tree
from sluice.entries.slicing import boxes, slice_entry
from sluice.loading.module_job import Job
from sluice.modules.initial_values import initial_values
from sluice.modules.install import Installed, finish_loading, install, install_one
from sluice.reading import transfer as _transfer
from sluice.reading.composites import component_requests, with_tensors
from sluice.records import DeviceMemory, Request

__all__ = ["Done", "fill", "same_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What ``fill`` did."""

    #: What the engine did.
    outcome: RunResult
    #: What installing did.
    installed: Installed
    #: What became of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...]
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...]


def fill(job: Job, checkpoint: OpenCheckpoint, *, strict: bool, progress: Progress) -> Done:
    """Run a job: compare copies of tied tensors, read, install.

    Raises:
        MismatchError: Tied names have different bytes; nothing was touched.
        PartialLoadError: A failure after live tensors began to change; its cause says what failed.
    """
    notes = [*job.notes, *_compare_tied(job, checkpoint, strict=strict)]
    extra_state = {name: _read_tree(checkpoint, value) for name, value in job.extra_state.items()}
    plan = job.prepared.plan
    targets = Targets(
        plan, {i: job.state.tensors[slot] for i, slot in enumerate(job.match.slots) if job.match.requests[i].existing}
    )
    finished: set[int] = set()
    before = _transfer.allocator_state(plan)
    initial = _initial_values(job, targets)

    def completed(position: int) -> None:
        slot = job.match.slots[position]
        if not job.match.requests[position].existing and not job.state.tensors[slot].is_meta:
            # A live tensor in another dtype or on another device: its old memory goes as soon as the new is whole.
            install_one(job.state, slot, *targets.tensors([job.prepared.views[position]]))
        finished.add(position)

    try:
        with byte_progress(progress, checkpoint.path, plan.read_bytes) as report:
            tensors, outcome = _transfer.run(checkpoint, job.prepared, targets, progress=report, completed=completed)
    except BaseException as error:
        _report_partial(job, targets, finished, error)
        raise
    installed = install(job.state, job.match, tensors, initial, placement=job.placement)
    missing, unexpected = finish_loading(job.state, job.match, extra_state, strict=strict)
    installed = replace(installed, missing=missing, unexpected=unexpected)
    memory = _transfer.device_memory(plan, before)
    return Done(outcome=outcome, installed=installed, device_memory=memory, notes=tuple(notes))


def _initial_values(job: Job, targets: Targets) -> dict[int, torch.Tensor]:
    """Compute what the checkpoint does not have, in its final memory."""
    slots = (*job.match.zeroed, *job.match.initialised)
    if not slots:
        return {}
    try:
        targets.reserve()
        memory = dict(zip(slots, targets.tensors(job.prepared.computed), strict=True))
        initial_values(job.state, job.match, memory, scratch_bytes=job.prepared.plan.device_scratch_bytes)
    except BaseException:
        targets.discard()
        raise
    return memory


def _read_tree(checkpoint: OpenCheckpoint, tree: object) -> object:
    """Return a part of the checkpoint with its tensors on the host, as ``torch.load`` gives it."""
    entries = list(_tree.every_entry(tree))
    if not entries:
        return tree
    requests = [request for entry in entries for request in component_requests("extra state", entry, device="cpu")]
    prepared = _transfer.prepare(checkpoint, requests, share_storages=True)
    tensors, _ = _transfer.run(checkpoint, prepared, Targets(prepared.plan))
    return with_tensors(tree, entries, tensors, file=checkpoint.path)


def _compare_tied(job: Job, checkpoint: OpenCheckpoint, *, strict: bool) -> list[str]:
    """Compare further copies of tied tensors with the first, slice by slice, before anything is touched."""
    notes = []
    for position, other in job.match.comparisons:
        first = job.match.requests[position]
        if same_values(checkpoint, first, other, limit_bytes=job.prepared.plan.staging_buffer_bytes):
            continue
        problem = f"{first.name!r} and {other.name!r} are tied in the model and differ in the checkpoint"
        if strict:
            raise MismatchError(problem, file=checkpoint.path, tensor=first.name)
        notes.append(f"{problem}; {first.name!r} was used")
    return notes


def same_values(checkpoint: OpenCheckpoint, first: Request, other: Request, *, limit_bytes: int) -> bool:
    """Return whether two tensors of one shape finish with the same bytes, ``limit_bytes`` of each at a time."""
    largest = max(ITEM_BYTES[dtype] for dtype in (first.entry.dtype, other.entry.dtype, first.dtype))
    for key in boxes(first.entry.shape, max(1, limit_bytes // largest)):
        requests = [_part(request, key) for request in (first, other)]
        prepared = _transfer.prepare(checkpoint, requests)
        tensors, _ = _transfer.run(checkpoint, prepared, Targets(prepared.plan))
        one, two = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
        if not torch.equal(one, two):
            return False
    return True


def _part(request: Request, key: tuple[slice, ...]) -> Request:
    """Return a request for a box of another one, as a tensor of its own on the host."""
    entry = slice_entry(request.entry, key) if key else request.entry
    return Request(
        name=request.name, entry=entry, dtype=request.dtype, device="cpu", stride=contiguous_stride(entry.shape)
    )


def _report_partial(job: Job, targets: Targets, finished: set[int], error: BaseException) -> None:
    """Say which live tensors changed, when any did; an interrupt stays an interrupt and carries it as a note."""
    names = [job.state.outline.slots[slot].names[0] for slot in job.match.slots]
    live = [i for i, slot in enumerate(job.match.slots) if not job.state.tensors[slot].is_meta]
    done = tuple(names[i] for i in live if i in finished)
    torn = tuple(
        names[i] for i in live if i not in finished and i in targets.touched and job.match.requests[i].existing
    )
    if not done and not torn:
        return
    untouched = tuple(name for name in (names[i] for i in live) if name not in {*done, *torn})
    partial = PartialLoadError(
        f"the load failed after live tensors began to change: {len(done)} done, {len(torn)} torn, "
        f"{len(untouched)} untouched",
        done=done,
        torn=torn,
        untouched=untouched,
    )
    if isinstance(error, Exception):
        raise partial from error
    error.add_note(str(partial))
