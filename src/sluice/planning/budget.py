"""What memory a load may take, what its plan needs, and what is short. Pure; no torch.

Limits come from the caller where he sets them, else from the control group, from free memory and from each accelerator.
A limit on virtual memory (``ulimit -v``) counts whatever the caller says: the system would refuse the mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice import _options as options
from sluice._errors import Alternative, BudgetError
from sluice._geometry import round_up
from sluice._options import MemoryLimits
from sluice._units import format_bytes, parse_bytes
from sluice.records import Block, LoadPlan, MachineFacts, Target

__all__ = [
    "ADDRESS_SPACE",
    "HOST",
    "MemoryLimit",
    "Shortage",
    "address_space_bytes",
    "budget_error",
    "device_limit",
    "find_limits",
    "plan_needs",
    "shortages",
]

#: Names, beside those of devices, of what has a limit.
HOST = "host"
ADDRESS_SPACE = "address space"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What one kind of memory may grow by."""

    #: ``"host"``, ``"address space"`` or a device as torch writes it.
    where: str
    #: The most that it may grow by, in bytes.
    nbytes: int
    #: Where the number comes from: ``"MemoryLimits(host=...)"``, ``"free memory"``, ``"left in the control group"``.
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A limit that a plan cannot keep."""

    #: The limit.
    limit: MemoryLimit
    #: Growth that the plan predicts, in bytes.
    needed_bytes: int
    #: The part of it that is weights, in bytes.
    weights_bytes: int

    def __str__(self) -> str:
        what = {HOST: "host memory", ADDRESS_SPACE: "virtual memory"}.get(
            self.limit.where, f"memory of {self.limit.where}"
        )
        return (
            f"the load needs {format_bytes(self.needed_bytes)} of {what}: {format_bytes(self.weights_bytes)} for "
            f"weights, {format_bytes(self.needed_bytes - self.weights_bytes)} for staging and overhead"
        )

    @property
    def allowed(self) -> str:
        """The limit in words."""
        return f"at most {format_bytes(self.limit.nbytes)} ({self.limit.origin})"


def device_limit(memory: MemoryLimits, device: str) -> int | None:
    """Return the bytes that the caller lets an accelerator's memory grow by; None without a limit."""
    limit = memory.device.get(device) if isinstance(memory.device, Mapping) else memory.device
    return None if limit is None else parse_bytes(limit)


def find_limits(facts: MachineFacts, memory: MemoryLimits) -> tuple[MemoryLimit, ...]:
    """Return what host, address space and each accelerator of the facts may grow by, as far as that is known.

    Args:
        facts: What was asked of the machine.
        memory: What the caller allows.
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
        return MemoryLimit(where=HOST, nbytes=parse_bytes(memory.host), origin="MemoryLimits(host=...)")
    nbytes, origin = facts.host_headroom
    return MemoryLimit(where=HOST, nbytes=nbytes, origin=origin)


def plan_needs(plan: LoadPlan) -> dict[str, int]:
    """Return the bytes by which a plan lets each kind of memory grow."""
    return {
        HOST: plan.predicted.total_bytes,
        ADDRESS_SPACE: address_space_bytes(
            plan.targets,
            plan.blocks,
            [*plan.arenas, *(held.nbytes for held in plan.mapped_ranges)],
            staging_bytes=plan.staging_buffers * plan.staging_buffer_bytes,
            huge_pages=plan.facts.huge_pages,
        ),
        **{device.device: device.predicted_bytes for device in plan.devices},
    }


def shortages(plan: LoadPlan, memory: MemoryLimits) -> tuple[Shortage, ...]:
    """Return the limits that a plan cannot keep, those of the host first."""
    needs = plan_needs(plan)
    return tuple(
        Shortage(limit=limit, needed_bytes=needs[limit.where], weights_bytes=_weights(plan, limit.where))
        for limit in find_limits(plan.facts, memory)
        if needs.get(limit.where, 0) > limit.nbytes
    )


def budget_error(found: Sequence[Shortage], alternatives: Sequence[Alternative], *, file: str) -> BudgetError:
    """Return the error for what is short, the first of it in its fields.

    Args:
        found: What is short.
        alternatives: What would fit.
        file: Path of the checkpoint.
    """
    first = found[0]
    text = "; ".join(str(shortage) if shortage is first else f"{shortage}, {shortage.allowed}" for shortage in found)
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
    """Return the virtual memory that a load takes without its threads, in bytes.

    Args:
        targets: Final memory.
        blocks: Where each target lies.
        shared: Bytes of each mapping that targets share: arenas and ranges of files.
        staging_bytes: Bytes of all staging buffers.
        huge_pages: Whether large mappings get huge pages.
    """
    sizes = [*_mappings(targets, blocks, huge_pages=huge_pages), *shared]
    return sum(round_up(size, options.BLOCK_BYTES) for size in sizes) + staging_bytes + options.RESERVED_ADDRESS_BYTES


def _mappings(targets: Sequence[Target], blocks: Sequence[Block], *, huge_pages: bool) -> Iterator[int]:
    """Yield the bytes of each mapping that a target has for itself, with the room that huge pages take."""
    for target, block in zip(targets, blocks, strict=True):
        if block.kind == "mapping":
            nbytes = block.lead_bytes + target.nbytes
            huge = huge_pages and nbytes >= options.HUGE_PAGE_BYTES
            yield round_up(nbytes, options.HUGE_PAGE_BYTES) if huge else nbytes
