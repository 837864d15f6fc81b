"""The one place that talks to accelerators: allocation, page-locked staging, asynchronous copies.

``Accelerator`` is all that the engine needs of a device. ``CudaAccelerator`` copies on a stream of its own out of
page-locked staging; ``BlockingAccelerator`` does the same with plain copies on any device that torch knows (mps, xpu,
npu); tests have one that copies late and in any order.

A copy may read its source until the ticket of a later ``mark`` has fired. A source is a run of bytes and the strided
view that is wanted of it: casts and views are made on the device, out of a scratch the size of one staging buffer, so
that the bus carries the file's bytes once and the host does nothing but read.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sluice._errors import BudgetError
from sluice._hostmemory import HostMemory
from sluice._records import DeviceFacts
from sluice._staging import Ticket
from sluice._units import format_bytes

__all__ = [
    "Accelerator",
    "BlockingAccelerator",
    "CudaAccelerator",
    "Source",
    "accelerator",
    "allocator_bytes",
    "device_facts",
]

#: ``cudaHostRegisterPortable``: page-locked for every device of the process.
_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class Source:
    """A strided view of bytes on the host."""

    #: The bytes from the first to the last element: one dimension of uint8, at any address.
    raw: torch.Tensor
    #: Dtype of the elements.
    dtype: torch.dtype
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]

    def on_host(self) -> torch.Tensor:
        """Return the view itself; bytes at an address that the dtype cannot have are moved to another one first."""
        aligned = self.raw.data_ptr() % self.dtype.itemsize == 0
        return self.seen_in(self.raw if aligned else self.raw.clone())

    def seen_in(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the view of a copy of the bytes."""
        return raw.view(self.dtype).as_strided(self.shape, self.stride, raw.storage_offset() // self.dtype.itemsize)


class Accelerator(Protocol):
    """A device during one load. Copies may be started from any thread."""

    def begin(self, staging: HostMemory | None, buffer_bytes: int) -> None:
        """Prepare for copies out of ``staging``, at most ``buffer_bytes`` at once."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Let the allocator keep one free block of ``nbytes`` for the allocations that follow; no more than a hint."""
        ...

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of one dimension.

        Raises:
            BudgetError: The device has no room; it carries the allocator's figures.
        """
        ...

    def copy(self, target: torch.Tensor, source: Source) -> None:
        """Start to copy ``source`` to ``target``, cast where the dtypes differ."""
        ...

    def mark(self) -> Ticket | None:
        """Return a ticket for the copies started so far, or None when they have read their sources already."""
        ...

    def finish(self) -> None:
        """Return once all copies are done and what the caller starts next sees them; give staging back to the host."""
        ...

    def release(self) -> None:
        """Give back what the allocator caches: a load that failed leaves the device as it found it."""
        ...


class BlockingAccelerator:
    """Any device, by copies that return when they are done."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def begin(self, staging: HostMemory | None, buffer_bytes: int) -> None:
        """Do nothing: there is no page-locking that all devices share."""

    def reserve(self, nbytes: int) -> None:
        """Do nothing: the allocator's habits are not known."""

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return _allocate(self._device, count, dtype)

    def copy(self, target: torch.Tensor, source: Source) -> None:
        target.copy_(source.on_host())

    def mark(self) -> None:
        return None

    def finish(self) -> None:
        torch.accelerator.synchronize(self._device)

    def release(self) -> None:
        """Do nothing: the allocator's habits are not known."""


class CudaAccelerator:
    """One CUDA device: copies on a stream of its own, out of memory that is page-locked for the length of the load."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # What the caller has queued may still use memory that the allocator is about to hand out again.
        self._callers = torch.cuda.current_stream(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(self._callers)
        self._buffer_bytes = 0
        self._scratch: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._locked: HostMemory | None = None

    def begin(self, staging: HostMemory | None, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        if staging is not None and _page_lock(staging, self._device):
            self._locked = staging

    def reserve(self, nbytes: int) -> None:
        with torch.cuda.stream(self._callers):
            try:
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                return  # each tensor by itself may still find room in what is cached

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        # On the caller's stream: the memory is theirs once the load has finished.
        with torch.cuda.stream(self._callers):
            return _allocate(self._device, count, dtype)

    def copy(self, target: torch.Tensor, source: Source) -> None:
        with self._lock, torch.cuda.stream(self._stream):  # one at a time, so that the scratch is used in stream order
            if (target.dtype, target.stride()) == (source.dtype, source.stride) and target.is_contiguous():
                _bytes_of(target).copy_(source.raw, non_blocking=True)
                return
            if self._scratch is None:
                self._scratch = _allocate(self._device, self._buffer_bytes, torch.uint8)
            scratch = self._scratch[: source.raw.nbytes]
            scratch.copy_(source.raw, non_blocking=True)
            target.copy_(source.seen_in(scratch))

    def mark(self) -> Ticket:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaTicket(event)

    def finish(self) -> None:
        # Waiting on the host, not only on the caller's stream: page-locked memory may not be unlocked before.
        self._stream.synchronize()
        self._scratch = None
        if self._locked is not None:
            _runtime().cudaHostUnregister(_address(self._locked))
            self._locked = None

    def release(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _CudaTicket:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


def accelerator(device: str) -> Accelerator:
    """Return the accelerator of a device, as torch writes it with its index: ``"cuda:0"``."""
    if torch.device(device).type == "cuda":
        return CudaAccelerator(device)
    return BlockingAccelerator(device)


def device_facts(device: str) -> DeviceFacts:
    """Return what a device says of its memory."""
    if torch.device(device).type != "cuda":
        return DeviceFacts(device=device)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceFacts(device=device, free_bytes=free, cached_bytes=cached)


def allocator_bytes(device: str) -> tuple[int, int] | None:
    """Return what torch's allocator has allocated and reserved of a device, or None where it does not say."""
    if torch.device(device).type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def _allocate(device: torch.device, count: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(count, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        facts = device_facts(str(device))
        free = "unknown" if facts.free_bytes is None else format_bytes(facts.free_bytes)
        raise BudgetError(
            f"{device} is out of memory: {format_bytes(count * dtype.itemsize)} more were needed, {free} are free and "
            f"{format_bytes(facts.cached_bytes)} are cached by torch in pieces",
        ) from error


def _page_lock(memory: HostMemory, device: torch.device) -> bool:
    """Page-lock staging; return False where the driver refuses, which makes copies slower and nothing else."""
    with torch.cuda.device(device):
        return int(_runtime().cudaHostRegister(_address(memory), memory.nbytes, _PORTABLE)) == 0


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(memory: HostMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.mapping, memory.start))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as one dimension of bytes; ``view`` cannot, of a tensor without dimensions."""
    return tensor.view(-1).view(torch.uint8)
