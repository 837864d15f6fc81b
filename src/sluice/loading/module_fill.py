"""Run a job of a module: compare, read, install.

Copies of tied tensors are compared first, then the data is read, and only then does a module on meta change. Live
tensors change while they are read; an error in that time names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import MismatchError, PartialLoadError
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunResult
from sluice.engine.targets import Targets
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import every_entry
from sluice.modules.initial_values import initial_values
from sluice.modules.install import after_loading, finish_loading, install, install_one
from sluice.reading.composites import component_requests, with_tensors
from sluice.reading.transfer import prepare, run
from sluice.records import Request, collector_paused
from sluice.records.geometry import contiguous_stride
from sluice.sharding.dtensors import local_of

if TYPE_CHECKING:
    from sluice.loading.module_job import ModuleJob

__all__ = [
    "ModuleData",
    "compare_tied",
    "fetch_module",
    "finish_module",
    "install_tensors",
    "naming_partial",
    "partial_load",
    "read_tree",
    "same_values",
]


class ModuleData(Struct, frozen=True, kw_only=True):
    """Everything that a module gets, read and computed; of the module only live tensors have changed."""

    #: Tensor of each request.
    tensors: list[torch.Tensor]
    #: Reads and times.
    result: RunResult
    #: Tensors that the checkpoint does not fill, by slot.
    initial: dict[int, torch.Tensor]
    #: Extra state of modules by name.
    extra_state: Mapping[str, object]
    #: Tensors that become attributes, by full name.
    attributes: Mapping[str, object]
    #: Positions of the live tensors that have changed in part, and of those that are complete.
    touched: frozenset[int]
    finished: frozenset[int]
    #: Notes for the report.
    notes: tuple[str, ...]


def fetch_module(job: ModuleJob, progress: Progress) -> ModuleData:
    """Compare copies of tied tensors and read the data.

    Raises:
        MismatchError: Tied names have different bytes; nothing was touched.
        PartialLoadError: A failure after live tensors began to change; its cause is the failure.
    """
    notes = compare_tied(job) if job.match.comparisons else ()
    extra_state = {name: read_tree(job.checkpoint, value) for name, value in job.extra_state.items()}
    attributes = {name: read_tree(job.checkpoint, entry) for name, entry in job.attributes.items()}
    finishers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}  # quantize weights, by the names of these
    live = {i: job.state.tensors[slot] for i, slot in enumerate(job.match.slots) if job.requests[i].existing}
    if job.state.divided:
        live = {i: local_of(tensor) for i, tensor in live.items()}
    targets = Targets(job.plan, live, finishers=finishers)
    finished: set[int] = set()  # of the live tensors
    initial = _compute_initial(job, targets) if job.match.zeroed or job.match.initialised else {}

    def completed(position: int) -> None:
        slot = job.match.slots[position]
        if job.state.tensors[slot].is_meta:
            return
        if not job.requests[position].existing:
            # A live tensor in another dtype or on another device: its old memory is freed when the new is complete.
            install_one(job.state, slot, *targets.tensors([job.prepared.views[position]]))
        finished.add(position)

    with ExitStack() as stack:
        if job.quantized:
            from sluice.quantizing.weights import quantizing_threads  # rarely needed

            cores = job.plan.facts.cores
            with _reserved(targets):  # the results get memory that was reserved on accelerators
                workers = stack.enter_context(quantizing_threads(cores))
                for position, weight in job.quantized.items():
                    finishers[job.requests[position].name] = weight.finisher(workers, cores)
        with naming_partial(lambda: partial_load(job, targets.touched, finished)):
            tensors, result = job.read(progress, targets, completed=completed)
    return ModuleData(
        tensors=tensors,
        result=result,
        initial=initial,
        extra_state=extra_state,
        attributes=attributes,
        touched=frozenset(targets.touched),
        finished=frozenset(finished),
        notes=tuple(notes),
    )


@contextmanager
def _reserved(targets: Targets) -> Iterator[None]:
    """Reserve the memory of accelerators, and free everything if the block fails."""
    try:
        targets.reserve()
        yield
    except BaseException:
        targets.discard()
        raise


def install_tensors(job: ModuleJob, data: ModuleData) -> tuple[str, ...]:
    """Install what was read; return the names of the tensors that became new objects."""
    with naming_partial(lambda: after_loading("they are not all in place", job.state)), collector_paused():
        replaced = install(job.state, job.match, data.tensors, data.initial, placement=job.placement)
    for weight in job.quantized.values():
        weight.set_attributes()
    # The module alone holds its memory when hooks run: those of fully_shard copy tensors one after the other, and each
    # frees its memory then.
    data.tensors.clear()
    data.initial.clear()
    return replaced


def finish_module(job: ModuleJob, data: ModuleData) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run the load hooks of modules, whose tensors are in place; see ``finish_loading``."""
    with naming_partial(lambda: after_loading("its load hooks were interrupted", job.state)):
        return finish_loading(
            job.state,
            job.match,
            data.extra_state,
            strict=job.strict,
            attributes=data.attributes,
            receivers=job.receivers,
        )


def _compute_initial(job: ModuleJob, targets: Targets) -> dict[int, torch.Tensor]:
    """Compute the tensors on meta that the checkpoint does not fill, in their final memory."""
    slots = (*job.match.zeroed, *job.match.initialised)
    with _reserved(targets):
        memory = dict(zip(slots, targets.tensors(job.prepared.computed), strict=True))
        initial_values(job.state, job.match, memory, scratch_bytes=job.plan.device_scratch_bytes)
    return memory


def read_tree(checkpoint: OpenCheckpoint, tree: object) -> object:
    """Return a part of the checkpoint with its tensors on the host, as ``torch.load`` returns it."""
    entries = list(every_entry(tree))
    tensors: list[torch.Tensor] = []
    if entries:
        requests = [request for entry in entries for request in component_requests("extra state", entry, device="cpu")]
        prepared = prepare(checkpoint, requests, share_storages=True)
        tensors, _ = run(checkpoint, prepared, Targets(prepared.plan))
    return with_tensors(tree, entries, tensors, file=checkpoint.path)


def compare_tied(job: ModuleJob) -> list[str]:
    """Compare further copies of tied tensors with the first, slice by slice; return a note for each that differs.

    Raises:
        MismatchError: Two copies differ, and the load is strict.
    """
    checkpoint, notes = job.checkpoint, []
    for position, other in job.match.comparisons:
        first = job.requests[position]
        if same_values(checkpoint, first, other, limit_bytes=job.plan.staging_buffer_bytes):
            continue
        problem = f"{first.name!r} and {other.name!r} are tied in the model and differ in the checkpoint"
        if job.strict:
            raise MismatchError(problem, file=checkpoint.path, tensor=first.name)
        notes.append(f"{problem}; {first.name!r} was used")
    return notes


def same_values(checkpoint: OpenCheckpoint, first: Request, other: Request, *, limit_bytes: int) -> bool:
    """Return whether two requests of one shape finish with equal bytes; read ``limit_bytes`` of each at a time."""
    largest = max(ITEM_BYTES[dtype] for dtype in (first.entry.dtype, other.entry.dtype, first.dtype))
    for key in boxes(first.entry.shape, max(1, limit_bytes // largest)):
        requests = [_part(request, key) for request in (first, other)]
        prepared = prepare(checkpoint, requests)
        tensors, _ = run(checkpoint, prepared, Targets(prepared.plan))
        if not torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)):
            return False
    return True


def _part(request: Request, key: tuple[slice, ...]) -> Request:
    """Return a request for a box of a request, as a separate tensor on the host."""
    entry = slice_entry(request.entry, key)
    return Request(
        name=request.name, entry=entry, dtype=request.dtype, device="cpu", stride=contiguous_stride(entry.shape)
    )


@contextmanager
def naming_partial(partial: Callable[[], PartialLoadError | None]) -> Iterator[None]:
    """Raise what ``partial`` returns instead of an error of the block; an interrupt gets it as a note."""
    try:
        yield
    except PartialLoadError:
        raise
    except BaseException as error:
        named = partial()
        if named is not None and isinstance(error, Exception):
            raise named from error
        if named is not None:
            error.add_note(str(named))
        raise


def partial_load(job: ModuleJob, touched: Collection[int], finished: Collection[int]) -> PartialLoadError | None:
    """Return an error that names the live tensors that changed; None if none did.

    Args:
        job: The decision.
        touched: Positions of the live tensors into which bytes were written.
        finished: Positions of the live tensors that are complete.
    """
    names = [job.state.outline.slots[slot].names[0] for slot in job.match.slots]
    live = [i for i, slot in enumerate(job.match.slots) if not job.state.tensors[slot].is_meta]
    done = tuple(names[i] for i in live if i in finished)
    torn = tuple(names[i] for i in live if i not in finished and i in touched and job.requests[i].existing)
    if not done and not torn:
        return None
    changed = {*done, *torn}
    untouched = tuple(name for name in (names[i] for i in live) if name not in changed)
    return PartialLoadError(
        f"the load failed after live tensors began to change: {len(done)} done, {len(torn)} torn, "
        f"{len(untouched)} untouched",
        done=done,
        torn=torn,
        untouched=untouched,
    )
