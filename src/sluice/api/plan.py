"""``sluice.plan``: the dry run of a load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import TYPE_CHECKING, cast

import torch
from msgspec.structs import replace

from sluice._arguments import check_load, check_model, check_plan_without_model, dtype_argument, memory_limits
from sluice._dtypes import DType
from sluice._options import TEXT_ENCODING, Limits, LoadPlace, Memory, PageCache, TransferOptions
from sluice._public import explain_keywords, public
from sluice.adapters.config import Adapters
from sluice.api.shared import plan_shared
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.entries.rules import Rule
from sluice.loading.devices import Device
from sluice.loading.dry_run import plan_report
from sluice.loading.job import LoadRequest
from sluice.loading.module_request import ModuleRequest
from sluice.loading.rank_plans import RankLayout, plan_ranks, tensor_parallel_dims
from sluice.loading.state_dict import StateDictRequest
from sluice.matching.renaming import Rename
from sluice.modules.unloaded import refuse_streamed
from sluice.reports.plan import PlanReport, RanksPlan
from sluice.sharding.layouts import mesh_of
from sluice.sharing.copies import SharedCopy

if TYPE_CHECKING:
    from sluice.quantizing.saved import OpenedWeight

__all__ = ["plan"]

_WITHOUT_MODEL = "without a model, its tensors are taken to be those of the checkpoint"


@public()
@explain_keywords
def plan(
    model: torch.nn.Module | None,
    source: CheckpointSource,
    *,
    device: Device = None,
    dtype: DType | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    allow_empty: bool = False,
    ignore_mismatched: bool = False,
    place: LoadPlace = "copy",
    quantize: object = None,
    adapters: Adapters | None = None,
    memory: Memory = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    page_cache: PageCache = "auto",
    stream: bool = False,
    mesh: Mapping[str, int] | None = None,
    ranks_per_host: int | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> PlanReport:
    """Plan a load without running it: predict its memory, and compare it with the limits and with other ways to load.

    ``load_into`` makes the same plan with the same code, so the two cannot disagree. The peaks of the usual ways to
    load (``torch.load`` and ``load_state_dict``, and its leaner variants) are predicted as well.

    Args:
        model: The module to plan for, best built under ``sluice.empty_init()``; None plans ``load_state_dict`` from
            the checkpoint alone, and takes the tensors of the file for those of a model.
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: As in ``load_into``; without a model one device.
        dtype: As in ``load_into``.
        key: As in ``load_into``.
        rename: As in ``load_into``.
        rules: As in ``load_into``.
        strict: As in ``load_into``.
        allow_empty: As in ``load_into``.
        ignore_mismatched: As in ``load_into``.
        place: As in ``load_into``.
        quantize: As in ``load_into``.
        adapters: As in ``load_into``.
        memory: How much memory may grow, as in ``load_into``. Limits that are not given are detected: the control
            group, free memory, free memory of each accelerator.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        page_cache: As in ``load_into``.
        stream: Plan ``sluice.stream`` too, with ``memory`` as its memory for weights: ``report.stream`` says whether
            it fits, what would stay, and what each call of the model would read. ``report.fits`` is that of a load.
        mesh: Plan for the ranks of a device mesh, without processes: ranks along each dimension by name, as in
            ``{"dp": 8, "tp": 4}``. ``dp``, ``fsdp``, ``dp_shard`` and ``shard`` divide every parameter as
            ``fully_shard`` does, ``ddp``, ``dp_replicate`` and ``replicate`` hold copies, ``tp`` divides what
            ``tp_plan`` names. The model is the whole one, without DTensors. The report is that of the rank whose memory
            grows most, and ``report.ranks`` has all ranks.
        ranks_per_host: Ranks that share a host, its page cache, its limit and ``staging``; all ranks by default.
        tp_plan: Tensor-parallel style by pattern of module names, such as ``{"layers.*.mlp.up_proj": "colwise"}``;
            ``model.tp_plan``, which models of transformers have, by default.

    Returns:
        Predicted peaks, the limits, whether the load fits, alternatives if it does not, and the comparison. A load that
        does not fit is not an error here.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: The checkpoint does not fit the module; every reason is listed.
        BudgetError: ``device="auto"`` with an accelerator whose free memory is unknown, or staging below 1 MiB.
        ValueError: A device cannot be used, an argument needs a model or a mesh, or has none of its accepted values.
        TypeError: An argument has a wrong type.
        ReadError: The operating system failed a read.

    Example:
        >>> with sluice.empty_init():
        ...     model = GPTModel(config)
        >>> report = sluice.plan(model, "model.pth", dtype=torch.bfloat16)
        >>> print(report.fits)
        True
        >>> print(report)
        would load ... of ... tensors of the model from model.pth (torch-zip), ... finished on cpu, ... to read
        ...
    """
    arguments = dict(locals())  # a copy: a tracer adds later variables to the dict of locals()
    check_model(model, source, "plan(model, source)", optional=True)
    if model is None:
        check_plan_without_model(**arguments)
    check_load(**arguments)
    if place == "shared" or isinstance(source, SharedCopy):
        return plan_shared(plan, **arguments)
    request: LoadRequest
    if model is not None:
        refuse_streamed(model, "be loaded into")
        request = ModuleRequest.of(arguments)
    else:
        own_dtype = dtype_argument(dtype, auto_is_none=True)
        one = "cpu" if device is None else cast("str | torch.device", device)
        options = TransferOptions(memory=memory_limits(memory), page_cache=page_cache)
        request = StateDictRequest(device=one, dtype=own_dtype, key=key, rules=rules, options=options)
    if stream and (model is None or mesh is not None):
        raise ValueError("plan(): stream=True needs a model, and no mesh")
    for name, given in (("adapters", adapters), ("quantize", quantize)):
        if given is not None and (model is None or mesh is not None):
            raise ValueError(f"plan(): {name}= needs a model, and no mesh")
    layout = _layout(model, mesh, ranks_per_host, tp_plan)
    if stream and quantize is not None:
        raise ValueError(
            "plan(): a stream does not quantize what it reads. Load once with quantize=, save the model, quantize an "
            "empty model in the same way, and stream the saved file into it"
        )
    found = borrow(source, limits=limits, encoding=encoding)
    opened = request.opened(found, finish=False) if isinstance(request, ModuleRequest) else nullcontext((found, ()))
    with opened as (opening, weights), opening as checkpoint:
        if layout is not None and isinstance(request, ModuleRequest):
            ranks, fullest = plan_ranks(request, checkpoint, layout)
            return plan_report(fullest, checkpoint, ranks=ranks, notes=(_ranks_note(ranks),))
        report = plan_report(request, checkpoint, notes=() if model is not None else (_WITHOUT_MODEL,))
        if stream and isinstance(request, ModuleRequest):
            return _with_stream(report, request, checkpoint, memory, weights)
        return report


def _with_stream(
    report: PlanReport,
    load: ModuleRequest,
    checkpoint: OpenCheckpoint,
    memory: Memory,
    quantized: tuple[OpenedWeight, ...],
) -> PlanReport:
    """Return the report with the plan of a stream."""
    # Here, not above: few plans are those of streams.
    from sluice.streaming.job import StreamRequest, plan_stream, stream_memory

    load = replace(load, options=replace(load.options, place="copy"))  # a stream maps nothing
    request = StreamRequest(load=load, memory_bytes=stream_memory(memory)[1], quantized=quantized)
    found = plan_stream(request, checkpoint)
    return dataclasses.replace(report, stream=found)


def _layout(
    model: torch.nn.Module | None,
    mesh: Mapping[str, int] | None,
    ranks_per_host: int | None,
    tp_plan: Mapping[str, str] | None,
) -> RankLayout | None:
    """Return the ranks to plan for; None without a mesh."""
    if mesh is None:
        if ranks_per_host is not None or tp_plan is not None:
            raise ValueError("plan(): ranks_per_host= and tp_plan= need mesh=, such as mesh={'dp': 8}")
        return None
    if model is None:
        raise ValueError("plan(None, source): mesh= needs a model, whose parameters are divided")
    if not isinstance(mesh, Mapping):
        raise TypeError(f"mesh must be a mapping from names to numbers of ranks, not {type(mesh).__name__}")
    known = mesh_of(mesh)
    own = known.ranks if ranks_per_host is None else ranks_per_host
    if not isinstance(own, Integral) or own < 1:
        raise ValueError(f"ranks_per_host must be positive, not {own!r}")
    tp_dims = {}
    if "tp" in mesh:
        plan_of_model = tp_plan or getattr(model, "tp_plan", None)
        if not isinstance(plan_of_model, Mapping) or not plan_of_model:
            raise ValueError("mesh dimension 'tp' needs tp_plan=, such as {'layers.*.mlp.up_proj': 'colwise'}")
        tp_dims = tensor_parallel_dims(model, plan_of_model)
    return RankLayout(mesh=known, ranks_per_host=min(int(own), known.ranks), tp_dims=tp_dims)


def _ranks_note(ranks: RanksPlan) -> str:
    return (
        f"memory and limits are those of rank {ranks.fullest.rank}, the fullest of {len(ranks.ranks)}; its limit is an "
        "equal share of its host's, which is taken to be like this one unless memory= says otherwise"
    )
