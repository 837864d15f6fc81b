"""From requests to finished tensors: locate, lay out, collect facts, plan, check the budget, run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._defaults import SERIAL_BYTES, SMALLEST_STAGING_BYTES
from sluice._options import NO_LIMITS, TransferOptions
from sluice._units import parse_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.accelerators import allocator_bytes, device_facts
from sluice.engine.running_plan import RunResult, run_small
from sluice.engine.targets import Targets
from sluice.machine.facts import machine_facts, mappable
from sluice.planning.budget import Change, check_budget, growth_of_copies
from sluice.planning.mappings import NOTHING_MAPPED, plan_mapping
from sluice.planning.memory_layout import shared_targets, single_targets
from sluice.planning.planner import plan_load
from sluice.reading.reader import CheckpointReader
from sluice.records import DeviceMemory, DevicePlan, LoadPlan, RemoteReads, Request, View

__all__ = ["Prepared", "changed", "meter", "plan_transfer", "planned_requests", "prepare", "run", "with_more"]


class Prepared(Struct, frozen=True, kw_only=True):
    """A plan, and the finished tensors as views of its targets."""

    #: The plan.
    plan: LoadPlan
    #: One view for each request.
    views: tuple[View, ...]
    #: One view for each tensor that the caller computes.
    computed: tuple[View, ...] = ()


def plan_transfer(
    checkpoint: OpenCheckpoint,
    requests: Sequence[Request],
    *,
    share_storages: bool = False,
    computed: Sequence[Request] = (),
    later_copies: Sequence[tuple[int, int]] = (),
    options: TransferOptions | None = None,
    serial_bytes: int = SERIAL_BYTES,
) -> Prepared:
    """Plan the transfer of ``requests`` without reading tensor data.

    Args:
        checkpoint: Where the entries come from.
        requests: The tensors to read.
        share_storages: Whether views of the same bytes share memory, as in the file.
        computed: Further tensors, whose entries have no storage: they get memory and no values.
        later_copies: Bytes of tensors on the host that code of the model replaces after the load, and of their copies.
        options: How; None for the defaults.
        serial_bytes: Most bytes that are read in the thread of the caller; 0 if it works on something else meanwhile.

    Limits are not checked: ``prepare`` and the verbs do that.

    Raises:
        CheckpointError: A header of the requested data is damaged.
    """
    options = options or TransferOptions()
    staging, ranks = parse_bytes((options.memory or NO_LIMITS).staging), options.host_ranks or 1
    offsets = checkpoint.locate(
        storage for request in requests if request.entry.numel for storage in request.entry.storages
    )
    lay_out = shared_targets if share_storages else single_targets
    targets, views = lay_out([*requests, *computed], checkpoint.index, offsets)
    mapped = NOTHING_MAPPED
    if options.place == "map":
        wanted = {fill.file for target in targets for fill in target.fills}
        can_map = [i in wanted and mappable(source) for i, source in enumerate(checkpoint.sources)]
        mapped = plan_mapping(targets, can_map)
    read = {fill.file for i, target in enumerate(targets) if i not in mapped.blocks for fill in target.fills}
    devices = tuple(map(device_facts, sorted({target.device for target in targets} - {"cpu"})))
    plan = plan_load(
        targets,
        checkpoint.index.files,
        replace(options.facts, devices=devices)
        if options.facts
        else machine_facts(checkpoint.sources, devices, host_ranks=ranks, read=read),
        # One of the ranks of a host gets a share of it, but not less than a load needs.
        staging_bytes=max(staging // ranks, min(staging, SMALLEST_STAGING_BYTES)),
        page_cache=options.page_cache,
        mapped=mapped,
        serial_bytes=serial_bytes,
    )
    count, more = len(requests), checkpoint.working_bytes
    prepared = Prepared(plan=plan, views=views[:count], computed=views[count:])
    if later_copies:  # staging is free again then
        more += max(0, growth_of_copies(later_copies) - plan.staging_buffers * plan.staging_buffer_bytes)
    return with_more(prepared, {"cpu": more}) if more else prepared


def with_more(prepared: Prepared, more: Mapping[str, int]) -> Prepared:
    """Return a plan with the memory that computing tensors takes, in bytes by device."""
    plan = prepared.plan
    devices = [
        replace(device, working_bytes=device.working_bytes + more.get(device.device, 0)) for device in plan.devices
    ]
    host, peaks = more.get("cpu", 0), plan.predicted
    peaks = dataclasses.replace(peaks, anon_bytes=peaks.anon_bytes + host, total_bytes=peaks.total_bytes + host)
    return replace(prepared, plan=replace(plan, predicted=peaks, devices=tuple(devices)))


def prepare(
    checkpoint: OpenCheckpoint,
    requests: Sequence[Request],
    *,
    share_storages: bool = False,
    options: TransferOptions | None = None,
) -> Prepared:
    """Plan the transfer of ``requests`` and check the memory limits; see ``plan_transfer``.

    Raises:
        BudgetError: The plan cannot keep the limits; it says whether smaller staging would.
        CheckpointError: A header of the requested data is damaged.
    """
    options = options or TransferOptions()

    def plan_with(change: Change) -> Prepared:
        return plan_transfer(checkpoint, requests, share_storages=share_storages, options=changed(options, change))

    prepared = plan_with(Change())
    memory = options.memory or NO_LIMITS
    check_budget(prepared.plan, memory, lambda change: plan_with(change).plan, file=checkpoint.path)
    return prepared


def changed(options: TransferOptions, change: Change) -> TransferOptions:
    """Return options with the staging size and place of a change."""
    memory = options.memory or NO_LIMITS
    if change.staging_bytes is not None:
        memory = dataclasses.replace(memory, staging=change.staging_bytes)
    return replace(options, memory=memory, place=change.place or options.place)


def run(
    checkpoint: OpenCheckpoint,
    prepared: Prepared,
    targets: Targets,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> tuple[list[torch.Tensor], RunResult]:
    """Run a plan and return one tensor for each request.

    Args:
        checkpoint: Where the bytes come from.
        prepared: What to do.
        targets: The plan's final memory.
        progress: Called with the bytes read so far.
        completed: Called with the position of each target as soon as it is whole.
    """
    try:
        if prepared.plan.small:
            result = run_small(prepared.plan, checkpoint.sources, targets, progress=progress, completed=completed)
        else:
            with CheckpointReader(checkpoint) as reader:
                result = reader.begin(prepared.plan, targets).wait(progress=progress, completed=completed)
        if progress is not None and not prepared.plan.read_bytes:  # as of a mapped load: its event is the last one, too
            progress(0)
        return targets.take(prepared.views), result
    except BaseException as error:
        _forget_tensors(error)
        targets.discard()
        raise


def _forget_tensors(error: BaseException) -> None:
    """Clear variables of the engine and of torch in the traceback: a tensor would keep its device memory reserved."""
    each: BaseException | None = error
    while each is not None:
        trace = each.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith(("sluice.", "torch.")):
                with suppress(RuntimeError):  # it is still running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        each = each.__cause__ or each.__context__


def planned_requests(checkpoint: OpenCheckpoint, plan: LoadPlan) -> RemoteReads | None:
    """Return the requests of a plan before it is run, when headers have been read; None if no file is remote."""
    found = [source.traffic for source in checkpoint.sources if hasattr(source, "traffic")]
    if not found:
        return None
    planned = plan.traffic()
    return RemoteReads(
        header_requests=sum(each.requests for each in found),
        header_bytes=sum(each.nbytes for each in found),
        planned_requests=planned.requests,
        planned_bytes=planned.nbytes,
    )


def meter(
    checkpoint: OpenCheckpoint, plan: LoadPlan
) -> Callable[[], tuple[tuple[DeviceMemory, ...], RemoteReads | None]]:
    """Return a function for the end of a plan: the growth of each accelerator's memory and the requests since now."""
    before = [allocator_bytes(device.device) for device in plan.devices]
    planned = planned_requests(checkpoint, plan)

    def measured() -> tuple[tuple[DeviceMemory, ...], RemoteReads | None]:
        memory = tuple(map(_grown, plan.devices, before))
        now = planned_requests(checkpoint, plan)
        if planned is None or now is None:
            return memory, None
        requests, nbytes = now.header_requests - planned.header_requests, now.header_bytes - planned.header_bytes
        return memory, dataclasses.replace(planned, requests=requests, received_bytes=nbytes)

    return measured


def _grown(device: DevicePlan, before: tuple[int, int] | None) -> DeviceMemory:
    after = allocator_bytes(device.device)
    grown = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    return DeviceMemory(
        device=device.device,
        requested_bytes=device.reservation.requested_bytes,
        predicted_bytes=device.predicted_bytes,
        allocated_bytes=grown and grown[0],
        reserved_bytes=grown and grown[1],
    )
