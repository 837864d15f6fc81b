"""Dry runs: the decision of a load, reported with its limits and with other ways to load. No tensor data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from torch.nn.parameter import is_lazy

from sluice._dtypes import ITEM_BYTES
from sluice._options import Place
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.loading.job import LoadJob, LoadRequest, figures
from sluice.loading.module_job import ModuleJob
from sluice.planning.budget import HOST, Change, MemoryLimit, find_alternatives, find_limits, shortages
from sluice.planning.other_methods import COPY, MAP, METHODS, MethodVerdict, Subject, Weight, judge, predict, recommend
from sluice.reading.transfer import planned_requests
from sluice.records import LoadPlan
from sluice.reports.plan import PlanReport, RanksPlan
from sluice.sharding.dtensors import local_of

__all__ = ["plan_report"]


def plan_report(
    request: LoadRequest,
    checkpoint: OpenCheckpoint,
    *,
    ranks: RanksPlan | None = None,
    notes: tuple[str, ...] = (),
) -> PlanReport:
    """Decide a load and report the decision instead of running it.

    Args:
        request: Arguments of the load.
        checkpoint: The checkpoint to plan for.
        ranks: The loads of all ranks, if the request is that of one of them.
        notes: Further notes for the report.
    """
    job, memory = request.job(checkpoint), request.memory
    plan, limits = job.plan, find_limits(job.plan.facts, memory)
    short, remote = shortages(plan, memory), planned_requests(checkpoint, plan)
    methods = tuple(_verdicts(job, _plans_by_place(request, job), limits))
    recommended, reason = recommend(methods)
    replan = partial(request.replan, checkpoint)
    return PlanReport(
        **figures(job),
        checkpoint_bytes=checkpoint.nbytes,
        remote=remote,
        staging_bytes=plan.staging_buffers * plan.staging_buffer_bytes,
        device_bytes={device.device: device.predicted_bytes for device in plan.devices},
        limits=limits,
        shortages=tuple(f"{each}, {each.allowed}" for each in short),
        alternatives=find_alternatives(plan, memory, replan, offer=request.offers) if short else (),
        methods=methods,
        recommended=recommended,
        reason=reason,
        ranks=ranks,
        notes=(*checkpoint.index.notes, *job.notes, *notes),
    )


def _subject(job: LoadJob) -> Subject:
    """Return the model and its checkpoint for the formulas of other ways to load."""
    checkpoint = job.checkpoint
    devices = Counter(target.device for target in job.plan.targets)
    return Subject(
        list(_weights(job)),
        [storage.nbytes for storage in checkpoint.index.storages],
        file_format=checkpoint.format
        if len(checkpoint.files) == 1 or checkpoint.format == "per-parameter"
        else "several files",
        devices=[device for device, _ in devices.most_common()],
    )


def _weights(job: LoadJob) -> Iterator[Weight]:
    """Yield the sizes of the model's tensors; without a module, the tensors of the checkpoint are taken for a model."""
    if not isinstance(job, ModuleJob):
        for request in job.requests:
            nbytes = request.entry.nbytes
            final_bytes = request.entry.numel * ITEM_BYTES[request.dtype]
            yield Weight(file=nbytes, built=nbytes, final=final_bytes)
        return
    request_of = dict(zip(job.match.slots, job.requests, strict=True))
    for position, slot in enumerate(job.state.outline.slots):
        filled_by = request_of.get(position)
        # A lazy parameter has no shape of its own.
        numel = prod(filled_by.entry.shape if filled_by else slot.held_shape)
        dtype = filled_by.dtype if filled_by else job.match.initial_dtypes.get(position, slot.dtype)
        yield Weight(
            file=filled_by.entry.nbytes if filled_by else 0,
            built=numel * ITEM_BYTES[slot.dtype],
            final=numel * ITEM_BYTES[dtype],
        )
    for held in job.state.unsaved.values():
        nbytes = local_of(held[0].tensor).nbytes
        yield Weight(file=0, built=nbytes, final=nbytes)


def _resident(job: LoadJob) -> dict[str, int]:
    """Return the bytes of the model that are in memory already, by device; ``"host"`` for the CPU."""
    nbytes: Counter[str] = Counter()
    if isinstance(job, ModuleJob):
        held = (*job.state.tensors, *(held[0].tensor for held in job.state.unsaved.values()))
        for tensor in map(local_of, held):
            if not tensor.is_meta and not is_lazy(tensor):
                nbytes[HOST if tensor.device.type == "cpu" else str(tensor.device)] += tensor.nbytes
    return dict(nbytes)


def _plans_by_place(request: LoadRequest, job: LoadJob) -> dict[Place, LoadPlan]:
    """Return the plan of the job and, if mapping makes a difference, the plan with the other ``place``."""
    place = request.options.place
    plans: dict[Place, LoadPlan] = {place: job.plan}
    if request.can_map:
        other: Place = "copy" if place == "map" else "map"
        plan = request.replan(job.checkpoint, Change(place=other))
        if plan.mapped_bytes or job.plan.mapped_bytes:
            plans[other] = plan
    return plans


def _verdicts(
    job: LoadJob, plans: Mapping[Place, LoadPlan], limits: tuple[MemoryLimit, ...]
) -> Iterator[MethodVerdict]:
    """Yield the verdict on each way to load, the usual ones first; they do not load parts of tensors."""
    resident, subject = _resident(job), _subject(job)
    divided = isinstance(job, ModuleJob) and any(slot.region is not None for slot in job.state.outline.slots)
    for method in () if divided else METHODS:
        yield judge(method, *predict(method, subject), limits=limits, resident=resident)
    for place, plan in plans.items():  # counted as for other methods: with the model, and with every page touched
        devices = {device.device: device.predicted_bytes + resident.get(device.device, 0) for device in plan.devices}
        host = (plan.predicted.anon_bytes + resident.get(HOST, 0), plan.mapped_bytes)
        yield judge(MAP if place == "map" else COPY, host, devices, "", limits=limits, resident=resident)
