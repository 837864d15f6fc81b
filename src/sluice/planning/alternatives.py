"""Alternatives to a load that does not fit: changes of its arguments with which it would.

Each change is planned completely, so that the advice is reliable; only refused loads pay for this. Single changes are
tried before combinations of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import torch_dtype
from sluice._errors import Alternative, BudgetError, SluiceError
from sluice._options import MemoryLimits, Place
from sluice._units import format_bytes, parse_bytes
from sluice.planning.budget import plan_needs, shortages
from sluice.records import LoadPlan

__all__ = ["Change", "Offer", "Replan", "check_budget", "find_alternatives"]

_MIB = 1 << 20


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
