"""What would fit where a load does not: each change of its arguments is planned, so that what is advised is true.

Only a load that is refused pays for this. A single change is tried before two at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice import _options as options
from sluice._dtypes import torch_dtype
from sluice._errors import Alternative, SluiceError
from sluice._options import MemoryLimits, Place
from sluice._units import parse_bytes
from sluice.planning.budget import ADDRESS_SPACE, budget_error, plan_needs, shortages
from sluice.records import LoadPlan

__all__ = ["Change", "Offer", "Replan", "check_budget", "what_would_fit"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Arguments of a load that are not as the caller gave them; None is as he did."""

    #: Name of another dtype, or ``"auto"`` for the checkpoint's.
    dtype: str | None = None
    #: Another device, or ``"auto"``.
    device: str | None = None
    #: The other way to place tensors.
    place: Place | None = None
    #: Smaller staging, in bytes.
    staging_bytes: int | None = None

    def arguments(self, memory: MemoryLimits) -> dict[str, object]:
        """Return the arguments by the names that the verbs have for them."""
        values: dict[str, object] = {"device": self.device, "place": self.place}
        if self.dtype is not None:
            values["dtype"] = "auto" if self.dtype == "auto" else torch_dtype(self.dtype)
        if self.staging_bytes is not None:
            values["memory"] = replace(memory, staging=self.staging_bytes)
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


#: Returns the plan of the same load with a change, unchecked; raises ``SluiceError`` or ``ValueError`` where there is
#: none.
Replan = Callable[[Change], LoadPlan]


#: Returns the single changes that a caller could ask for, beside smaller staging. Called only when something is short:
#: looking for accelerators takes time.
Offer = Callable[[], Sequence[Change]]


def check_budget(plan: LoadPlan, memory: MemoryLimits, replan: Replan, *, file: str, offer: Offer = tuple) -> None:
    """Raise ``BudgetError`` with what would fit instead when a plan cannot keep its limits.

    Args:
        plan: The plan to judge.
        memory: What the caller allows.
        replan: Plans the same load with a change.
        file: Path of the checkpoint, for the message.
        offer: Returns the changes that could be asked for.
    """
    found = shortages(plan, memory)
    if found:
        raise budget_error(found, what_would_fit(plan, memory, replan, offer=offer), file=file)


def what_would_fit(
    plan: LoadPlan, memory: MemoryLimits, replan: Replan, *, offer: Offer = tuple
) -> tuple[Alternative, ...]:
    """Return the changes with which a load that does not fit does; the arguments are those of ``check_budget``."""
    single = list(offer())
    both = [replace(one, dtype=other.dtype) for one in single for other in single if other.dtype and not one.dtype]
    smallest = options.SMALLEST_STAGING_BYTES
    rounds: list[list[Change]] = [
        [*_smaller_staging(plan, memory), *single],
        [replace(change, staging_bytes=smallest) for change in single],
        both,
        [replace(change, staging_bytes=smallest) for change in both],
    ]
    for changes in rounds:
        found = tuple(made for change in changes if (made := _try(change, memory, replan)))
        if found:
            return found
    return ()


def _smaller_staging(plan: LoadPlan, memory: MemoryLimits) -> Iterator[Change]:
    """Yield the largest staging, a power of two, that leaves the room that is missing on the host."""
    excess = max((each.needed_bytes - each.limit.nbytes for each in shortages(plan, memory)), default=0)
    held = plan.staging_buffers * plan.staging_buffer_bytes
    size = 1 << (parse_bytes(memory.staging) - 1).bit_length()
    while (size := size // 2) >= options.SMALLEST_STAGING_BYTES:
        if held - size >= excess:
            yield Change(staging_bytes=size)
            return


def _try(change: Change, memory: MemoryLimits, replan: Replan) -> Alternative | None:
    try:
        plan = replan(change)
    except (SluiceError, ValueError):
        return None  # another dtype or device can be refused for reasons of its own
    if shortages(plan, memory):
        return None
    needs = {where: nbytes for where, nbytes in plan_needs(plan).items() if where != ADDRESS_SPACE}
    return Alternative(change=str(change), arguments=change.arguments(memory), needs=needs)
