"""Memory limits of a load, the needs of its plan, and shortages.

Limits are those of the caller, or else come from the control group, free memory and each accelerator.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._options import MemoryLimits
from sluice._units import format_bytes, parse_bytes
from sluice.records import LoadPlan, MachineFacts

__all__ = [
    "HOST",
    "MemoryLimit",
    "Shortage",
    "device_limit",
    "find_limits",
    "for_whole_host",
    "growth_of_copies",
    "plan_needs",
    "shortages",
]

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
    limits = [_host_limit(facts, memory)]
    for known in facts.devices:
        allowed = device_limit(memory, known.device)
        if allowed is not None:
            limits.append(MemoryLimit(where=known.device, nbytes=allowed, origin="MemoryLimits(device=...)"))
        elif known.free_bytes is not None:
            free = known.free_bytes + known.cached_bytes
            limits.append(MemoryLimit(where=known.device, nbytes=free, origin="free on the device"))
    return tuple(limits)


def _host_limit(facts: MachineFacts, memory: MemoryLimits) -> MemoryLimit:
    if memory.host is not None:
        share = f", divided by {facts.host_ranks} ranks" if facts.host_ranks > 1 else ""
        nbytes = parse_bytes(memory.host) // facts.host_ranks
        return MemoryLimit(where=HOST, nbytes=nbytes, origin=f"MemoryLimits(host=...){share}")
    nbytes, origin = facts.host_headroom
    return MemoryLimit(where=HOST, nbytes=nbytes, origin=origin)


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
