"""``sluice.plan``: the dry run of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from sluice._options import Limits, MemoryLimits, PageCache, Place, TransferOptions
from sluice._public import public
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.entries.rules import Rule
from sluice.loading.devices import Device
from sluice.loading.dry_run import plan_report
from sluice.loading.job import LoadRequest, dtype_argument
from sluice.loading.module_job import ModuleRequest
from sluice.loading.state_dict import StateDictRequest
from sluice.matching.renaming import Rename
from sluice.reports.plan import PlanReport

__all__ = ["plan"]

_WITHOUT_MODEL = "without a model, its tensors are taken to be those of the checkpoint"


@public()
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
    allow_empty: bool = False,
    place: Place = "copy",
    memory: MemoryLimits | None = None,
    limits: Limits | None = None,
    page_cache: PageCache = "auto",
    probe: bool = False,
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
        place: As in ``load_into``.
        memory: How much memory may grow, and the size of the staging buffers. Limits that are not given are detected:
            the control group, free memory, ``ulimit -v``, free memory of each accelerator.
        limits: Bounds for hostile files.
        page_cache: As in ``load_into``.
        probe: Read up to 256 MiB to estimate times.

    Returns:
        Predicted peaks, the limits, whether the load fits, alternatives if it does not, and the comparison. A load that
        does not fit is not an error here.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: The checkpoint does not fit the module; every reason is listed.
        BudgetError: ``device="auto"`` with an accelerator whose free memory is unknown, or staging below 1 MiB.
        ValueError: A device cannot be used, or an argument needs a model.
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
    options = TransferOptions(memory=memory, page_cache=page_cache, place=place)
    request: LoadRequest
    if model is not None:
        request = ModuleRequest(
            model=model,
            device=device,
            dtype=dtype_argument(dtype),
            key=key,
            rename=rename,
            rules=rules,
            strict=strict,
            allow_empty=allow_empty,
            options=options,
        )
    elif (
        rename is not None
        or not strict
        or allow_empty
        or place != "copy"
        or isinstance(device, Mapping)
        or device == "auto"
    ):
        raise ValueError("rename=, strict=, allow_empty=, place= and several devices need a model")
    else:
        own_dtype = None if dtype == "auto" else dtype_argument(dtype)
        request = StateDictRequest(device=device or "cpu", dtype=own_dtype, key=key, rules=rules, options=options)
    with borrow(source, limits=limits) as checkpoint:
        return plan_report(request, checkpoint, probe=probe, notes=() if model is not None else (_WITHOUT_MODEL,))
