"""``sluice.plan``: the dry run of a load. It shares every decision with the load itself, and reads no tensor data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal

import torch

from sluice._dtypes import ITEM_BYTES, dtype_name
from sluice._options import Limits, MemoryLimits, PageCache, Place, TransferOptions
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.loading import module_job as _module_plan
from sluice.loading import state_dict as _state_dict
from sluice.loading.devices import Device, device_name, parse_placement
from sluice.loading.module_job import Job
from sluice.loading.read_probe import probe_rates
from sluice.matching.renaming import Rename
from sluice.planning.alternatives import Change, Offer, Replan, what_would_fit
from sluice.planning.budget import HOST, find_limits, shortages
from sluice.planning.other_methods import METHODS, Forecast, Rates, Subject, Weight, forecast
from sluice.planning.recommendation import COPY, MAP, MethodVerdict, judge, recommend
from sluice.records import LoadPlan, Peaks, Request
from sluice.reports.explanation import explain
from sluice.reports.plan import PlanReport
from sluice.reports.report_rows import casts
from sluice.rules._apply import Rule

__all__ = ["plan"]


def plan(
    model: torch.nn.Module | None,
    source: CheckpointSource,
    *,
    device: Device = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    place: Place = "copy",
    memory: MemoryLimits | None = None,
    limits: Limits | None = None,
    page_cache: PageCache = "auto",
    probe: bool = False,
) -> PlanReport:
    """Plan a load without doing it: what it would take, whether that is there, and what other ways would take.

    The plan is made by the code that ``load_into`` runs, so the two cannot disagree. The peaks of the usual ways to
    load (``torch.load`` and ``load_state_dict``, and its leaner variants) are predicted beside it.

    Args:
        model: The module to plan for, best built under ``sluice.empty_init()``; None plans ``load_state_dict`` from
            the checkpoint alone, and takes the tensors of the file for the model's.
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: As in ``load_into``; without a model one device.
        dtype: As in ``load_into``.
        key: As in ``load_into``.
        rename: As in ``load_into``.
        rules: As in ``load_into``.
        strict: As in ``load_into``.
        place: As in ``load_into``.
        memory: What memory may grow by, and the size of the staging buffers. Limits that are not given are found: the
            control group, free memory, ``ulimit -v``, what each accelerator has free.
        limits: Bounds for hostile files.
        page_cache: As in ``load_into``.
        probe: Read up to 256 MiB to estimate times.

    Returns:
        Predicted peaks, the limits, whether the load fits, what would fit if not, and the comparison. A load that does
        not fit is no error here.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: OpenCheckpoint and module disagree; every reason is listed.
        BudgetError: ``device="auto"`` cannot tell what an accelerator has free, or staging is below 1 MiB.
        ValueError: A device cannot be used, or an argument needs a model.
        ReadError: The operating system failed a read.

    Example:
        >>> with sluice.empty_init():
        ...     model = GPTModel(config)
        >>> report = sluice.plan(model, "model.pth", dtype=torch.bfloat16)
        >>> print(report.fits)
        True
        >>> print(report)
        model.pth (torch-zip): ... tensors, ... finished on cpu, ... to read
        ...
    """
    transfer = TransferOptions(memory=memory, page_cache=page_cache, place=place)
    cast = dtype if dtype is None or isinstance(dtype, str) else dtype_name(dtype)
    with borrow(source, limits=limits) as checkpoint:
        if model is None:
            if rename is not None or not strict or place != "copy" or isinstance(device, Mapping) or device == "auto":
                raise ValueError("rename=, strict=, place= and several devices need a model")
            planned = _without_model(checkpoint, device, None if cast == "auto" else cast, key, rules, transfer)
        else:
            wanted = _module_plan.Wanted(
                placement=parse_placement(device),
                dtype=cast,
                key=key,
                rename=rename,
                rules=rules,
                strict=strict,
                options=transfer,
            )
            planned = _with_model(model, checkpoint, wanted)
        return _report(planned, checkpoint, transfer, probe=probe)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A load that is decided, and what the report says of it."""

    #: What the engine would do.
    plan: LoadPlan
    #: What would be read.
    requests: tuple[Request, ...]
    #: The model and its file, for the formulas.
    subject: Subject
    #: Bytes of the model that are in memory already, by device; ``"host"`` is the CPU's.
    resident: Mapping[str, int]
    #: The load with other arguments.
    replan: Replan
    #: The arguments that could be asked for.
    offer: Offer
    #: The same load with the other ``place``; None where that changes nothing.
    other_place: LoadPlan | None
    #: Fields of the report that are known already.
    said: Mapping[str, object]


def _without_model(
    checkpoint: OpenCheckpoint,
    device: str | torch.device | None,
    dtype: str | None,
    key: str | None,
    rules: Sequence[Rule],
    transfer: TransferOptions,
) -> _Planned:
    where = device_name(device or "cpu")
    wanted = _state_dict.Wanted(device=where, dtype=dtype, key=key, rules=rules, options=transfer)
    job = _state_dict.plan_state_dict(checkpoint, wanted)
    replan, offer = _state_dict.state_dict_changes(checkpoint, wanted)
    weights = [
        Weight(
            file_bytes=request.entry.nbytes,
            built_bytes=request.entry.nbytes,
            final_bytes=request.entry.numel * ITEM_BYTES[request.dtype],
        )
        for request in job.requests
    ]
    return _Planned(
        plan=job.prepared.plan,
        requests=job.requests,
        subject=_subject(checkpoint, weights, [where]),
        resident={},
        replan=replan,
        offer=offer,
        other_place=None,
        said={
            "key": key,
            "cast": casts(job.requests),
            "notes": ("without a model, its tensors are taken to be those of the checkpoint",),
        },
    )


def _with_model(model: torch.nn.Module, checkpoint: OpenCheckpoint, wanted: _module_plan.Wanted) -> _Planned:
    job = _module_plan.plan_module(model, checkpoint, wanted)
    replan, offer = _module_plan.module_changes(model, checkpoint, wanted)
    other = replan(Change(place="copy" if wanted.options.place == "map" else "map"))
    slots = job.state.outline.slots
    return _Planned(
        plan=job.prepared.plan,
        requests=job.match.requests,
        subject=_subject(checkpoint, list(_weights(job)), [target.device for target in job.prepared.plan.targets]),
        resident=_resident(job),
        replan=replan,
        offer=offer,
        other_place=other if other.mapped_bytes or job.prepared.plan.mapped_bytes else None,
        said={
            "key": job.selection.key,
            "prefix": job.selection.prefix,
            "placement": job.placement,
            "cast": casts(job.match.requests),
            "missing": job.match.missing,
            "unexpected": job.match.unexpected,
            "tied": job.match.tied,
            "initialised": tuple(name for slot in job.match.initialised for name in slots[slot].names),
            "notes": (*job.selection.notes, *job.notes),
        },
    )


def _weights(job: Job) -> Iterator[Weight]:
    """Yield the tensors of a module, in its order; those that no state dict holds come last."""
    filled = dict(zip(job.match.slots, job.match.requests, strict=True))
    for position, slot in enumerate(job.state.outline.slots):
        request = filled.get(position)
        shape = request.entry.shape if request else slot.shape  # a lazy parameter has no shape of its own
        dtype = request.dtype if request else job.match.initial_dtypes.get(position, slot.dtype)
        yield Weight(
            file_bytes=request.entry.nbytes if request else 0,
            built_bytes=prod(shape) * ITEM_BYTES[slot.dtype],
            final_bytes=prod(shape) * ITEM_BYTES[dtype],
        )
    for held in job.state.unsaved.values():
        nbytes = held[0].tensor.nbytes
        yield Weight(file_bytes=0, built_bytes=nbytes, final_bytes=nbytes)


def _resident(job: Job) -> dict[str, int]:
    """Return the bytes of the module that are in memory already, by where they are."""
    tensors = [*job.state.tensors, *(held[0].tensor for held in job.state.unsaved.values())]
    found: Counter[str] = Counter()
    for tensor in tensors:
        if not tensor.is_meta and not torch.nn.parameter.is_lazy(tensor):
            found[HOST if tensor.device.type == "cpu" else str(tensor.device)] += tensor.nbytes
    return dict(found)


def _subject(checkpoint: OpenCheckpoint, weights: Sequence[Weight], devices: Sequence[str]) -> Subject:
    found = Counter(devices)
    return Subject(
        weights=tuple(weights),
        storages=tuple(storage.nbytes for storage in checkpoint.index.storages),
        format=checkpoint.format,
        files=len(checkpoint.files),
        device=found.most_common(1)[0][0] if found else "cpu",
        several_devices=len(found) > 1,
    )


def _report(planned: _Planned, checkpoint: OpenCheckpoint, transfer: TransferOptions, *, probe: bool) -> PlanReport:
    made, subject = planned.plan, planned.subject
    memory = transfer.memory or MemoryLimits()
    short = shortages(made, memory)
    rates = (
        probe_rates(checkpoint, planned.requests, made, device=subject.device, transfer=replace(transfer, place="copy"))
        if probe and made.targets
        else None
    )
    methods = tuple(_verdicts(planned, memory, transfer.place, rates))
    recommended, reason = recommend(methods)
    said = dict(planned.said)
    notes = (*checkpoint.index.notes, *said.pop("notes"))  # type: ignore[misc]  # a tuple of texts
    return PlanReport(
        source=checkpoint.path,
        format=checkpoint.format,
        files=checkpoint.files,
        devices=tuple(sorted({target.device for target in made.targets})),
        tensors=len(made.targets),
        final_bytes=made.final_bytes,
        checkpoint_bytes=checkpoint.nbytes,
        read_bytes=made.read_bytes,
        mapped_bytes=made.mapped_bytes,
        staging_bytes=made.staging_buffers * made.staging_buffer_bytes,
        predicted=made.predicted,
        device_bytes={device.device: device.predicted_bytes for device in made.devices},
        limits=find_limits(made.facts, memory),
        shortages=tuple(f"{each}, {each.allowed}" for each in short),
        alternatives=what_would_fit(made, memory, planned.replan, offer=planned.offer) if short else (),
        methods=methods,
        recommended=recommended,
        reason=reason,
        rates=rates,
        notes=notes,
        explanation=partial(explain, made),
        **said,  # type: ignore[arg-type]  # the fields that _Planned.said is made of
    )


def _verdicts(planned: _Planned, memory: MemoryLimits, place: Place, rates: Rates | None) -> Iterator[MethodVerdict]:
    """Yield what each way to load takes, the usual ones first."""
    subject = planned.subject
    limits = find_limits(planned.plan.facts, memory)
    for method in METHODS:
        found = forecast(method, subject, rates)
        devices = {} if subject.device == "cpu" else {subject.device: found.device_bytes}
        yield judge(found, devices, limits, resident=planned.resident)
    both = [(place, planned.plan), ("copy" if place == "map" else "map", planned.other_place)]
    for where, made in both:
        if made is not None:
            found = _own_forecast(MAP if where == "map" else COPY, made, planned.resident, rates)
            devices = {
                device.device: device.predicted_bytes + planned.resident.get(device.device, 0)
                for device in made.devices
            }
            yield judge(found, devices, limits, resident=planned.resident)


def _own_forecast(name: str, made: LoadPlan, resident: Mapping[str, int], rates: Rates | None) -> Forecast:
    """Return what sluice takes, counted as the other methods are: with the model, and every page touched."""
    anon = made.predicted.anon_bytes + resident.get(HOST, 0)
    seconds = None
    if rates is not None:
        touched = made.mapped_bytes / (2 * rates.copy if rates.cached else rates.serial)
        seconds = made.read_bytes / rates.sluice + touched
    return Forecast(
        method=name,
        host=Peaks(anon_bytes=anon, file_bytes=made.mapped_bytes, shmem_bytes=0, total_bytes=anon + made.mapped_bytes),
        seconds=seconds,
    )
