"""Growth of memory during a load, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from sluice._public import public

__all__ = ["DeviceMemory", "Peaks"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Growth of host memory during a load, in bytes: predicted by a plan, or measured."""

    #: Private anonymous memory.
    anon_bytes: int
    #: Pages of mapped files.
    file_bytes: int
    #: Shared memory.
    shmem_bytes: int
    #: Peak of the sum of all three, which can be less than the sum of their peaks.
    total_bytes: int


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """Growth of the memory of one accelerator during a load, in bytes: predicted and measured."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Bytes of the tensors.
    requested_bytes: int
    #: Predicted growth of the reserved bytes of torch's allocator, without cached memory.
    predicted_bytes: int
    #: Growth of torch's allocated bytes; None if unknown.
    allocated_bytes: int | None = None
    #: Growth of torch's reserved bytes; None if unknown.
    reserved_bytes: int | None = None
