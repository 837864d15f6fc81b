"""Memory limits of a load, the needs of its plan, shortages, and changes of its arguments with which it would fit.

Limits are those of the caller, or else come from the control group, free memory and each accelerator. Each change is
planned completely, so that the advice is reliable; only refused loads pay for this. Single changes are tried before
combinations of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import torch_dtype
from sluice._errors import Alternative, BudgetError, SluiceError
from sluice._options import MemoryLimits, Place
from sluice._units import format_bytes, parse_bytes
from sluice.records import LoadPlan, MachineFacts

__all__ = [
    "HOST",
    "Change",
    "MemoryLimit",
    "Offer",
    "Replan",
    "Shortage",
    "check_budget",
    "device_limit",
    "find_alternatives",
    "find_limits",
    "for_whole_host",
    "growth_of_copies",
    "plan_needs",
    "shortages",
]

_MIB = 1 << 20

#: Kind of memory with a limit, in addition to devices.
HOST = "host"


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """Limit on the growth of one kind of memory."""

    #: ``"host"`` or a device as torch writes it.
    where: str
    #: Largest growth, in bytes.
    nbytes: int
    #: Origin of the limit: ``"MemoryLimits(host=...)"``, ``"free memory"``, ``"left in the control group"``.
    origin: str


class Shortage(Struct, frozen=True, kw_only=True):
    """A limit that a plan exceeds."""

    #: The limit.
    limit: MemoryLimit
    #: Predicted growth, in bytes.
    needed_bytes: int
    #: Bytes of weights in the predicted growth.
    weights_bytes: int

    def __str__(self) -> str:
        kind = "host memory" if self.limit.where == HOST else f"memory of {self.limit.where}"
        return (
            f"the load needs {format_bytes(self.needed_bytes)} of {kind}: {format_bytes(self.weights_bytes)} for "
            f"weights, {format_bytes(self.needed_bytes - self.weights_bytes)} for staging and overhead"
        )

    @property
    def allowed(self) -> str:
        """The limit as text, with its origin."""
        return f"at most {format_bytes(self.limit.nbytes)} ({self.limit.origin})"


def device_limit(memory: MemoryLimits, device: str) -> int | None:
    """Return the caller's limit on the growth of an accelerator's memory, in bytes; None if there is none."""
    limit = memory.device.get(device) if isinstance(memory.device, Mapping) else memory.device
    return None if limit is None else parse_bytes(limit)


def find_limits(facts: MachineFacts, memory: MemoryLimits) -> tuple[MemoryLimit, ...]:
    """Return the known limits of the host and each accelerator of the facts.

    Args:
        facts: Facts about the machine.
        memory: Limits of the caller.
    """
    nbytes, origin = facts.host_headroom
    if memory.host is not None:
        share = f", divided by {facts.host_ranks} ranks" if facts.host_ranks > 1 else ""
        nbytes, origin = parse_bytes(memory.host) // facts.host_ranks, f"MemoryLimits(host=...){share}"
    limits = [MemoryLimit(where=HOST, nbytes=nbytes, origin=origin)]
    for known in facts.devices:
        allowed = device_limit(memory, known.device)
        if allowed is not None:
            limits.append(MemoryLimit(where=known.device, nbytes=allowed, origin="MemoryLimits(device=...)"))
        elif known.free_bytes is not None:
            free = known.free_bytes + known.cached_bytes
            limits.append(MemoryLimit(where=known.device, nbytes=free, origin="free on the device"))
    return tuple(limits)


def for_whole_host(plan: LoadPlan) -> LoadPlan:
    """Return a plan whose facts have the memory of the whole host, for limits on the growth of all its ranks."""
    facts = plan.facts
    ranks = facts.host_ranks
    if ranks == 1:
        return plan
    limit = facts.memory_limit_bytes
    whole = replace(
        facts,
        memory_available_bytes=facts.memory_available_bytes * ranks,
        memory_limit_bytes=None if limit is None else limit * ranks,
        host_ranks=1,
    )
    return replace(plan, facts=whole)


def growth_of_copies(copies: Iterable[tuple[int, int]]) -> int:
    """Return the peak growth of host memory while code of the model replaces tensors by copies, in bytes.

    A large tensor frees its memory when its copy is complete. A small one shares an arena with others, which may stay.

    Args:
        copies: Bytes of each tensor and of its copy.
    """
    copies = list(copies)
    freed = [old for old, _ in copies if old >= defaults.OWN_MAPPING_BYTES]
    return sum(new for _, new in copies) - sum(freed) + max(freed, default=0)


def plan_needs(plan: LoadPlan) -> dict[str, int]:
    """Return the predicted growth of each kind of memory, in bytes."""
    return {HOST: plan.predicted.total_bytes, **{device.device: device.predicted_bytes for device in plan.devices}}


def shortages(plan: LoadPlan, memory: MemoryLimits) -> tuple[Shortage, ...]:
    """Return the limits that a plan exceeds, those of the host first."""
    needs = plan_needs(plan)
    return tuple(
        Shortage(limit=limit, needed_bytes=needs[limit.where], weights_bytes=_weights(plan, limit.where))
        for limit in find_limits(plan.facts, memory)
        if needs.get(limit.where, 0) > limit.nbytes
    )


def _weights(plan: LoadPlan, where: str) -> int:
    device = "cpu" if where == HOST else where
    pairs = zip(plan.targets, plan.blocks, strict=True)
    return sum(
        target.nbytes
        for target, block in pairs
        if target.device == device and not target.existing and block.kind != "mapped"
    )


class Change(Struct, frozen=True, kw_only=True):
    """Overrides of the arguments of a load; None keeps the value of the caller."""

    #: Name of a different dtype, or ``"auto"`` for that of the checkpoint.
    dtype: str | None = None
    #: A different device, or ``"auto"``.
    device: str | None = None
    #: A different placement of tensors.
    place: Place | None = None
    #: Smaller staging, in bytes.
    staging_bytes: int | None = None

    def arguments(self, memory: MemoryLimits) -> dict[str, object]:
        """Return the overrides as keyword arguments of the public functions."""
        values: dict[str, object] = {"device": self.device, "place": self.place}
        if self.dtype is not None:
            values["dtype"] = "auto" if self.dtype == "auto" else torch_dtype(self.dtype)
        if self.staging_bytes is not None:
            values["memory"] = dataclasses.replace(memory, staging=self.staging_bytes)
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = []
        if self.staging_bytes is not None:
            parts.append(f"MemoryLimits(staging='{self.staging_bytes // _MIB}MiB')")
        if self.place is not None:
            parts.append(f"place={self.place!r}")
        if self.device is not None:
            parts.append(f"device={self.device!r}")
        if self.dtype is not None:
            parts.append("dtype='auto'" if self.dtype == "auto" else f"dtype=torch.{self.dtype}")
        return " with ".join(parts)


#: Function that plans the same load with a change, without checking limits; raises ``SluiceError`` or ``ValueError`` if
#: that is impossible.
Replan = Callable[[Change], LoadPlan]

#: Function that returns the single changes to try in addition to smaller staging. It is called only if memory is short,
#: because looking for accelerators takes time.
Offer = Callable[[], Sequence[Change]]


def check_budget(plan: LoadPlan, memory: MemoryLimits, replan: Replan, *, file: str, offer: Offer = tuple) -> None:
    """Raise ``BudgetError`` with alternatives if a plan exceeds its limits.

    Args:
        plan: The plan to check.
        memory: Limits of the caller.
        replan: Function that plans the same load with a change.
        file: Path of the checkpoint, for the message.
        offer: Function that returns the changes to try.

    Raises:
        BudgetError: The plan exceeds a limit.
    """
    exceeded = shortages(plan, memory)
    if not exceeded:
        return
    first = exceeded[0]
    raise BudgetError(
        "; ".join(str(short) if short is first else f"{short}, {short.allowed}" for short in exceeded),
        file=file,
        expected=first.allowed,
        found=format_bytes(first.needed_bytes),
        alternatives=find_alternatives(plan, memory, replan, offer=offer),
    )


def find_alternatives(
    plan: LoadPlan, memory: MemoryLimits, replan: Replan, *, offer: Offer = tuple
) -> tuple[Alternative, ...]:
    """Return changes with which a load would fit; for the arguments see ``check_budget``."""
    single = list(offer())
    both = [
        replace(change, dtype=other.dtype) for change in single for other in single if other.dtype and not change.dtype
    ]
    smallest = defaults.SMALLEST_STAGING_BYTES
    rounds: list[list[Change]] = [
        [*_smaller_staging(plan, memory), *single],
        [replace(change, staging_bytes=smallest) for change in single],
        both,
        [replace(change, staging_bytes=smallest) for change in both],
    ]
    for changes in rounds:
        fitting = tuple(alternative for change in changes if (alternative := _try(change, memory, replan)))
        if fitting:
            return fitting
    return ()


def _smaller_staging(plan: LoadPlan, memory: MemoryLimits) -> Iterator[Change]:
    """Yield the change to the largest power of two of staging bytes that removes the shortage, if there is one."""
    excess = max((short.needed_bytes - short.limit.nbytes for short in shortages(plan, memory)), default=0)
    held = plan.staging_buffers * plan.staging_buffer_bytes
    size = 1 << (parse_bytes(memory.staging) - 1).bit_length()
    while (size := size // 2) >= defaults.SMALLEST_STAGING_BYTES:
        if held - size // plan.facts.host_ranks >= excess:
            yield Change(staging_bytes=size)
            return


def _try(change: Change, memory: MemoryLimits, replan: Replan) -> Alternative | None:
    """Return the alternative of a change; None if it cannot be planned or does not fit."""
    try:
        plan = replan(change)
    except (SluiceError, ValueError):
        return None  # the change itself may be invalid, such as a dtype that a tensor cannot have
    if shortages(plan, memory):
        return None
    return Alternative(change=str(change), arguments=change.arguments(memory), needs=plan_needs(plan))
