"""Memory limits of a load, the needs of its plan, and shortages.

Limits are those of the caller, or else come from the control group, free memory and each accelerator. A limit on
virtual memory (``ulimit -v``) always applies, because the system would refuse the mappings.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import Alternative, BudgetError
from sluice._options import MemoryLimits
from sluice._units import format_bytes, parse_bytes
from sluice.records import Block, LoadPlan, MachineFacts, Target
from sluice.records.geometry import round_up

__all__ = [
    "ADDRESS_SPACE",
    "HOST",
    "MemoryLimit",
    "Shortage",
    "address_space_bytes",
    "budget_error",
    "device_limit",
    "find_limits",
    "for_whole_host",
    "plan_needs",
    "shortages",
]

#: Kinds of memory with a limit, in addition to devices.
HOST = "host"
ADDRESS_SPACE = "address space"


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """Limit on the growth of one kind of memory."""

    #: ``"host"``, ``"address space"`` or a device as torch writes it.
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
        kind = {HOST: "host memory", ADDRESS_SPACE: "virtual memory"}.get(
            self.limit.where, f"memory of {self.limit.where}"
        )
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
    """Return the known limits of the host, the address space and each accelerator of the facts.

    Args:
        facts: Facts about the machine.
        memory: Limits of the caller.
    """
    limits = [_host_limit(facts, memory)]
    if facts.address_space_bytes is not None:
        limits.append(MemoryLimit(where=ADDRESS_SPACE, nbytes=facts.address_space_bytes, origin="left by ulimit -v"))
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


def plan_needs(plan: LoadPlan) -> dict[str, int]:
    """Return the predicted growth of each kind of memory, in bytes; of virtual memory only if it is limited."""
    needs = {HOST: plan.predicted.total_bytes, **{device.device: device.predicted_bytes for device in plan.devices}}
    if plan.facts.address_space_bytes is not None:
        needs[ADDRESS_SPACE] = address_space_bytes(
            plan.targets,
            plan.blocks,
            [*plan.arenas, *(held.nbytes for held in plan.mapped_ranges)],
            staging_bytes=plan.staging_buffers * plan.staging_buffer_bytes,
            huge_pages=plan.facts.huge_pages,
        )
    return needs


def shortages(plan: LoadPlan, memory: MemoryLimits) -> tuple[Shortage, ...]:
    """Return the limits that a plan exceeds, those of the host first."""
    needs = plan_needs(plan)
    return tuple(
        Shortage(limit=limit, needed_bytes=needs[limit.where], weights_bytes=_weights(plan, limit.where))
        for limit in find_limits(plan.facts, memory)
        if needs.get(limit.where, 0) > limit.nbytes
    )


def budget_error(exceeded: Sequence[Shortage], alternatives: Sequence[Alternative], *, file: str) -> BudgetError:
    """Return the error for exceeded limits, with the first of them in its fields.

    Args:
        exceeded: The shortages, at least one.
        alternatives: Changes of the arguments with which the load would fit.
        file: Path of the checkpoint.
    """
    first = exceeded[0]
    text = "; ".join(str(short) if short is first else f"{short}, {short.allowed}" for short in exceeded)
    return BudgetError(
        text,
        file=file,
        expected=first.allowed,
        found=format_bytes(first.needed_bytes),
        alternatives=alternatives,
    )


def _weights(plan: LoadPlan, where: str) -> int:
    device = "cpu" if where in {HOST, ADDRESS_SPACE} else where
    pairs = zip(plan.targets, plan.blocks, strict=True)
    return sum(
        target.nbytes
        for target, block in pairs
        if target.device == device and not target.existing and (block.kind != "mapped" or where == ADDRESS_SPACE)
    )


def address_space_bytes(
    targets: Sequence[Target], blocks: Sequence[Block], shared: Iterable[int], *, staging_bytes: int, huge_pages: bool
) -> int:
    """Return the virtual memory of a load without its threads, in bytes.

    Args:
        targets: Final memory.
        blocks: Block of each target.
        shared: Bytes of each mapping that targets share: arenas and ranges of files.
        staging_bytes: Bytes of all staging buffers.
        huge_pages: Whether large mappings use huge pages.
    """
    sizes = [*_mappings(targets, blocks, huge_pages=huge_pages), *shared]
    return sum(round_up(size, defaults.BLOCK_BYTES) for size in sizes) + staging_bytes + defaults.RESERVED_ADDRESS_BYTES


def _mappings(targets: Sequence[Target], blocks: Sequence[Block], *, huge_pages: bool) -> Iterator[int]:
    """Yield the bytes of each mapping with a single target, rounded up to huge pages where they are used."""
    for target, block in zip(targets, blocks, strict=True):
        if block.kind == "mapping":
            nbytes = block.lead_bytes + target.nbytes
            huge = huge_pages and nbytes >= defaults.HUGE_PAGE_BYTES
            yield round_up(nbytes, defaults.HUGE_PAGE_BYTES) if huge else nbytes
