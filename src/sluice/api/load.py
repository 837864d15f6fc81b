"""The verbs that move tensors: short bodies, full docstrings. ``open``, which needs no torch, is in ``_checkpoint``."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from sluice._dtypes import dtype_name
from sluice._options import Limits, MemoryLimits, PageCache, Place, TransferOptions
from sluice._progress import Progress, byte_progress
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.engine.session import RunResult
from sluice.engine.targets import Targets
from sluice.loading import module_fill as _module_load
from sluice.loading import module_job as _module_plan
from sluice.loading import optimizer as _optimizers
from sluice.loading import state_dict as _state_dict
from sluice.loading.devices import Device, device_name, parse_placement
from sluice.machine.peaks import PeakMeter
from sluice.matching.renaming import Rename
from sluice.reading import transfer as _transfer
from sluice.reading.composites import with_tensors
from sluice.records import Entry, LoadPlan, Peaks
from sluice.reports.load import LoadReport
from sluice.reports.report_rows import casts, request_rows, tensor_rows
from sluice.rules._apply import Rule

__all__ = ["load_entries", "load_into", "load_optimizer", "load_state_dict"]


def load_into(
    model: torch.nn.Module,
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
    progress: Progress = False,
    page_cache: PageCache = "auto",
) -> LoadReport:
    """Fill a module with the weights of a checkpoint: peak memory = the finished model + the staging buffers.

    A module built under ``sluice.empty_init()`` is either loaded or untouched. In a module with real parameters those
    of the right device and dtype are filled in place; the others get new memory, one tensor at a time. Tied
    parameters stay one object, parameters stay the objects that an optimizer holds, hooks and modes survive.

    Args:
        model: The module. Nothing of it is on the meta device afterwards.
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: Where the tensors go; None leaves each where it is, and what is on meta goes to the CPU. A mapping from
            prefixes of names to devices places parts: ``{"": "cuda:0", "head": "cuda:1"}``; the longest prefix wins.
            ``"auto"`` fills accelerators in order, up to ``memory.device`` or what they have free, and leaves the rest
            to the CPU; modules that share a tensor stay together, and ``report.placement`` says what was chosen.
        dtype: None keeps the module's dtypes, as ``load_state_dict`` does; ``"auto"`` takes the checkpoint's; a dtype
            applies to real floating-point tensors that come from the checkpoint.
        key: Part of the checkpoint: a path into the nested object or a dotted prefix of names
            (``load_into(model.trf_blocks[0], f, key="trf_blocks.0")``). None finds the state dict that fits the module.
        rename: New names for those of the checkpoint: a mapping, ``(regular expression, replacement)`` pairs, or a
            function that returns None to drop a name.
        rules: What the tensors become before they are matched, by their new names: transposed, split, joined, cast;
            see ``sluice.rules``.
        strict: Whether missing and unexpected names are errors. If not, live parameters without an entry keep their
            values, and those on meta are initialised by their module's ``reset_parameters``.
        place: ``"copy"`` gives every tensor memory of its own. ``"map"`` makes those that go to the CPU unchanged pages
            of the file: ready at once, shared between processes, loaded when touched, copied when written to. The rest
            is copied, and the report says why. The file must stay as it is while the model lives.
        memory: How much memory may grow, and the size of the staging buffers.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        page_cache: ``"auto"`` reads around the page cache what is not in it, ``"keep"`` leaves the file cached for
            the next load, ``"bypass"`` leaves nothing.

    Returns:
        What was read and how, what was missing, tied or cast, and predicted beside measured memory.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: OpenCheckpoint and module disagree; every reason is listed and nothing was touched.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ValueError: A device cannot be used, or a prefix names nothing of the module.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed meanwhile.
        PartialLoadError: One of the above, after live tensors began to change.

    Example:
        >>> with sluice.empty_init():
        ...     model = GPTModel(config)
        >>> report = sluice.load_into(model, "model.pth", dtype=torch.bfloat16)
        >>> print(report)
        model.pth (torch-zip): ... tensors, ... on cpu
        ...
    """
    started = time.perf_counter()
    with PeakMeter() as meter, borrow(source, limits=limits) as checkpoint:
        wanted = _module_plan.Wanted(
            placement=parse_placement(device),
            dtype=dtype if dtype is None or isinstance(dtype, str) else dtype_name(dtype),
            key=key,
            rename=rename,
            rules=rules,
            strict=strict,
            options=TransferOptions(memory=memory, page_cache=page_cache, place=place),
        )
        job = _module_plan.prepare_module(model, checkpoint, wanted)
        done = _module_load.fill(job, checkpoint, strict=strict, progress=progress)
    return _report(job, done, checkpoint, seconds=time.perf_counter() - started, measured=meter.peaks)


def load_entries(
    model: torch.nn.Module,
    checkpoint: OpenCheckpoint,
    entries: Mapping[str, Entry],
    *,
    device: Device,
    options: TransferOptions,
    progress: Progress,
) -> LoadReport:
    """Fill a module with entries that have its names already, because a library converted them.

    Args:
        model: The module. What ``entries`` does not name has to be real, and keeps its values.
        checkpoint: What the entries view.
        entries: What fills each parameter and persistent buffer.
        device: As in ``load_into``.
        options: How the bytes are moved.
        progress: As in ``load_into``.
    """
    started = time.perf_counter()
    with PeakMeter() as meter:
        job = _module_plan.prepare_entries(
            model, checkpoint, entries, placement=parse_placement(device), options=options
        )
        done = _module_load.fill(job, checkpoint, strict=False, progress=progress)
    return _report(job, done, checkpoint, seconds=time.perf_counter() - started, measured=meter.peaks)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    source: CheckpointSource,
    *,
    model: torch.nn.Module | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    device: str | torch.device | None = None,
    memory: MemoryLimits | None = None,
    limits: Limits | None = None,
    progress: Progress = False,
) -> LoadReport:
    """Fill an optimizer with the state of a checkpoint, as ``optimizer.load_state_dict`` would: without a second copy.

    Each tensor is read straight to its final device and in its final dtype, which are torch's choice: floating-point
    parameters decide for their state, ``step`` keeps its own dtype unless ``fused`` or ``capturable`` says otherwise.
    The state is swapped in at the end, by ``optimizer.load_state_dict`` itself: until then the optimizer is as it was.

    Args:
        optimizer: Made of the parameters of the model, in as many groups as in the checkpoint. Load the model first.
        source: As in ``load_into``. Of a directory with an ``optimizer.pt`` or ``optimizer.bin`` beside the model, that
            file is read; of several (``optimizer_1.bin``) the only one that fits. An open checkpoint that ``load_into``
            has read too is indexed once.
        model: Names the parameters, where the checkpoint has state by name (torch.distributed.checkpoint, FSDP). An
            optimizer that was made of ``named_parameters()`` does without. Numbered state needs no names.
        key: Part of the checkpoint, as ``"optimizer"``. None finds the only state that fits.
        rename: New names for the parameters of a state by name, as in ``load_into``; None for a name leaves it out.
        device: Where the state stays until the first ``step``, which moves it to the parameters. None puts it there
            at once.
        memory: How much memory may grow, and the size of the staging buffers.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        What was read and how, under which key, and predicted beside measured memory.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind. ``UnsupportedError`` where the state was
            divided over ranks (DeepSpeed's ZeRO, Megatron, flat parameters of FSDP1); it says what to do.
        MismatchError: No state, or more than one, fits the optimizer; every reason or candidate is listed.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ValueError: The device cannot be used.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed meanwhile.

    Example:
        >>> with sluice.open("run.pt") as checkpoint:
        ...     weights = sluice.load_into(model, checkpoint)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     state = sluice.load_optimizer(optimizer, checkpoint)
        ...     scheduler.load_state_dict(checkpoint.tree["scheduler"])
    """
    started = time.perf_counter()
    opening = _optimizers.optimizer_checkpoint(optimizer, source, model=model, key=key, rename=rename, limits=limits)
    with PeakMeter() as meter, opening as checkpoint:
        job = _optimizers.prepare_optimizer(
            optimizer,
            checkpoint,
            model=model,
            key=key,
            rename=rename,
            device=None if device is None else device_name(device),
            options=TransferOptions(memory=memory),
        )
        outcome, device_memory = _optimizers.fill_optimizer(job, checkpoint, progress=progress)
    plan, found = job.prepared.plan, job.found
    seconds = time.perf_counter() - started
    return replace(
        _transfer_report(plan, outcome, checkpoint, seconds=seconds, measured=meter.peaks),
        key=found.key,
        device_memory=device_memory,
        missing=found.missing,
        unexpected=found.unexpected,
        cast=casts(job.requests),
        rows=partial(request_rows, job.requests, [view.target for view in job.prepared.views], plan, checkpoint.index),
        notes=(*checkpoint.index.notes, *found.notes, *plan.reasons),
    )


def load_state_dict(
    source: CheckpointSource,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    key: str | None = None,
    rules: Sequence[Rule] = (),
    memory: MemoryLimits | None = None,
    limits: Limits | None = None,
    progress: Progress = False,
    page_cache: PageCache = "auto",
) -> OrderedDict[str, Any]:
    """Load a state dict: what ``torch.load(weights_only=True)`` gives, with peak memory = its tensors + the buffers.

    Tensors that share storage in the file share it in the result, Parameters come back as Parameters, sparse and
    quantized tensors as such, Python attributes of tensors and other values are kept, and so is ``_metadata``. Of each
    storage only the bytes that its tensors need are read and held.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: Where the tensors go.
        dtype: Cast real floating-point tensors to this; None keeps the file's dtypes.
        key: Part of the checkpoint. None takes a flat state dict as it is, else the only candidate inside.
        rules: What the tensors become, see ``sluice.rules``; the result is flat then, and other values stay.
        memory: How much memory may grow, and the size of the staging buffers.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        page_cache: As in ``load_into``.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: There is no state dict, or more than one; the message lists them.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed meanwhile.

    Example:
        >>> state_dict = sluice.load_state_dict("model.pth", dtype=torch.bfloat16)
    """
    with borrow(source, limits=limits) as checkpoint:
        job = _state_dict.prepare_state_dict(
            checkpoint,
            _state_dict.Wanted(
                device=device_name(device),
                dtype=None if dtype is None else dtype_name(dtype),
                key=key,
                rules=rules,
                options=TransferOptions(memory=memory, page_cache=page_cache),
            ),
        )
        plan = job.prepared.plan
        with byte_progress(progress, checkpoint.path, plan.read_bytes) as report:
            tensors, _ = _transfer.run(checkpoint, job.prepared, Targets(plan), progress=report)
    values = with_tensors(job.chosen, job.entries, tensors, file=checkpoint.path)
    state_dict = OrderedDict(values)
    state_dict.__dict__.update(getattr(values, "__dict__", {}))
    return state_dict


def _report(
    job: _module_plan.Job, done: _module_load.Done, checkpoint: OpenCheckpoint, *, seconds: float, measured: Peaks
) -> LoadReport:
    plan, match = job.prepared.plan, job.match
    return replace(
        _transfer_report(plan, done.outcome, checkpoint, seconds=seconds, measured=measured),
        key=job.selection.key,
        prefix=job.selection.prefix,
        placement=job.placement,
        device_memory=done.device_memory,
        missing=done.installed.missing,
        unexpected=done.installed.unexpected,
        tied=match.tied,
        cast=casts(match.requests),
        origins={request.name: request.entry.origin for request in match.requests if request.entry.origin},
        replaced=done.installed.replaced,
        initialised=tuple(name for slot in match.initialised for name in job.state.outline.slots[slot].names),
        rows=partial(tensor_rows, job.decided(checkpoint)),
        notes=(*checkpoint.index.notes, *job.selection.notes, *done.notes, *plan.reasons),
    )


def _transfer_report(
    plan: LoadPlan, outcome: RunResult, checkpoint: OpenCheckpoint, *, seconds: float, measured: Peaks
) -> LoadReport:
    """Return what is the same for whatever was filled."""
    return LoadReport(
        source=checkpoint.path,
        format=checkpoint.format,
        files=checkpoint.files,
        devices=tuple(sorted({target.device for target in plan.targets})),
        tensors=len(plan.targets),
        final_bytes=plan.final_bytes,
        read_bytes=plan.read_bytes,
        mapped_bytes=plan.mapped_bytes,
        seconds=seconds,
        predicted=plan.predicted,
        measured=measured,
        reads=outcome.read_bytes,
        stepped_down=outcome.stepped_down,
    )
