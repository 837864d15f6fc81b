"""Growth of memory during a load: predicted by a plan, measured beside it."""

from __future__ import annotations

from dataclasses import dataclass

from sluice._public import public

__all__ = ["DeviceMemory", "Peaks"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Growth of memory during a load, in bytes: predicted by a plan or measured beside it."""

    #: Private anonymous memory.
    anon_bytes: int
    #: Pages of mapped files.
    file_bytes: int
    #: Shared memory.
    shmem_bytes: int
    #: Peak of the three together, which can be less than the sum of their peaks.
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Growth of one accelerator's memory during a load, in bytes: predicted beside measured."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: What the tensors asked for.
    requested_bytes: int
    #: What the plan predicted that torch's allocator would reserve, were nothing cached.
    predicted_bytes: int
    #: What torch's allocator has more allocated than before; None where it does not say.
    allocated_bytes: int | None = None
    #: What torch's allocator has more reserved than before; None where it does not say.
    reserved_bytes: int | None = None
