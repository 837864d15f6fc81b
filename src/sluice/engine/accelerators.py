"""Accelerators: allocation, page-locked staging and asynchronous copies.

``Accelerator`` is the engine's interface to a device, and uses plain copies on any device (mps). ``StreamAccelerator``
copies from page-locked staging on a side stream, on every device with streams. Tests use a simulated device that torch
takes for an accelerator, and a fake that checks each copy.

A copy may read its source until the ticket of a later ``mark`` has fired. The source is a run of bytes with a strided
view: casts and views are made on the device, from a scratch buffer the size of one staging buffer. The bus carries the
bytes of the file once, and the host only reads.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from sluice._errors import BudgetError
from sluice._units import format_bytes
from sluice.engine.host_copies import StridedBytes, copy_in_pieces
from sluice.engine.host_memory import HostMemory
from sluice.engine.packs import decode_packs
from sluice.engine.staging import Ticket
from sluice.engine.vendors import stream_module, vendor
from sluice.records import DeviceFacts

__all__ = [
    "Accelerator",
    "StreamAccelerator",
    "accelerator",
    "accelerators",
    "allocate_on",
    "allocator_bytes",
    "current_device",
    "device_facts",
]


class Accelerator:
    """Any device during one load, with copies that return when they are done. Threads may call every method."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def begin(self, scratch_bytes: int) -> None:
        """Prepare for copies, each through at most ``scratch_bytes`` of device memory; here they allocate their own."""

    def reserve(self, nbytes: int) -> None:
        """Let the allocator cache one free block of ``nbytes`` for the allocations that follow, if it is known how."""

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised one-dimensional memory.

        Raises:
            BudgetError: The device is out of memory; the message has the allocator's figures.
        """
        return allocate_on(self._device, count, dtype)

    def copy(self, target: torch.Tensor, source: StridedBytes) -> None:
        """Start to copy ``source`` to ``target``, computed and cast if the dtypes differ."""
        copy_in_pieces(target, source)

    def mark(self) -> Ticket | None:
        """Return a ticket for the copies started so far, or None if they have already read their sources."""
        return None

    def order(self) -> None:
        """Let the work that the caller starts next on the device wait for the copies that were started."""

    def finish(self) -> None:
        """Return once all copies are done and visible to the work that the caller starts next."""
        torch.accelerator.synchronize(self._device)

    def release(self) -> None:
        """Empty the allocator's cache, after a load that failed, if it is known how."""


class StreamAccelerator(Accelerator):
    """One device with streams, such as a CUDA device, with copies on a side stream."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._module: Any = stream_module(device)
        self._vendor = vendor(device)
        self._callers: torch.Stream = self._module.current_stream(self._device)
        self._stream = _side_stream(device)
        # Kernels that the caller has queued may still read tensors that are about to be filled in place.
        self._stream.wait_stream(self._callers)
        self._scratch_bytes = 0
        self._scratch: torch.Tensor | None = None
        self._lock = threading.Lock()

    def begin(self, scratch_bytes: int) -> None:
        self._scratch_bytes = scratch_bytes

    def reserve(self, nbytes: int) -> None:
        with self._on(self._callers):
            if 0 < self._module.memory_stats(self._device).get("max_split_size", 0) < nbytes:
                return  # blocks of this size must not be split, so that it could not hold the tensors
            try:
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                return  # single tensors may still fit into cached blocks

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        # On the caller's stream, which owns the memory after the load. A kernel that is still queued there may be the
        # last user of the memory, so that the copies must wait for it.
        with self._lock, self._on(self._callers):
            memory = allocate_on(self._device, count, dtype)
            self._stream.wait_stream(self._callers)
            return memory

    def copy(self, target: torch.Tensor, source: StridedBytes) -> None:
        with self._lock, self._on(self._stream):  # one copy at a time: the scratch is used in stream order
            same = (target.dtype, target.stride()) == (source.dtype, source.stride) and target.is_contiguous()
            if same and not source.elements.computed:
                self._send(target.view(-1).view(torch.uint8), source)  # a scalar needs the first view
                return
            if self._scratch is None:
                self._scratch = allocate_on(self._device, self._scratch_bytes, torch.uint8)
            scratch = self._scratch[: source.raw.nbytes]
            self._send(scratch, source)
            if source.elements.packing is not None:
                decode_packs(target, source.seen_in(scratch), source.elements.packing, source.elements.arithmetic)
                return
            # In place, gaps and all, so that no further memory is needed. A view may show an element twice, which torch
            # refuses to compute with in place.
            for operation, number in source.elements.arithmetic:
                getattr(scratch.view(source.dtype), f"{operation}_")(number)
            target.copy_(source.seen_in(scratch))

    def _send(self, target: torch.Tensor, source: StridedBytes) -> None:
        target.copy_(source.raw, non_blocking=self._vendor.locks_pages)

    def mark(self) -> Ticket:
        with self._module.device(self._device):
            event = self._vendor.event(self._device)
            event.record(self._stream)
            return event

    def order(self) -> None:
        with self._lock:
            self._callers.wait_stream(self._stream)

    def finish(self) -> None:
        try:
            # On the host, not only on the caller's stream: staging is freed next.
            self._stream.synchronize()
        finally:
            self._scratch = None

    def release(self) -> None:
        with self._module.device(self._device):
            self._module.empty_cache()

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # The device first: leaving a stream context restores the previous device, and a thread that never selected one
        # would create a context on device 0.
        with self._module.device(self._device), self._module.stream(stream):
            yield


@cache
def _side_stream(device: str) -> torch.Stream:
    """Return the side stream of a device: one per process, because the allocator caches scratch memory by stream."""
    stream: torch.Stream = stream_module(device).Stream(device)
    return stream


def accelerator(device: str) -> Accelerator:
    """Return the accelerator for a device name with its index, such as ``"cuda:0"``."""
    return Accelerator(device) if stream_module(device) is None else StreamAccelerator(device)


@contextmanager
def page_locked(memory: HostMemory, devices: Iterable[str]) -> Iterator[None]:
    """Page-lock staging during the ``with`` block, for all devices of the process, so that they copy without the host.

    If the driver refuses, copies are slower and nothing else changes.
    """
    names = [name for name in devices if vendor(name).locks_pages]
    if not names:
        yield
        return
    name = names[0]
    device, driver = torch.device(name), vendor(name)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.mapping, memory.start))
    locked = True  # until it is known: an interrupt may come after the driver has done it
    try:
        locked = driver.lock_pages(device, address, memory.nbytes)
        yield
    finally:
        if locked:
            try:
                driver.unlock_pages(device, address)
            except BaseException:  # an interrupt
                driver.unlock_pages(device, address)
                raise


def accelerators() -> tuple[str, ...]:
    """Return the names of all available accelerators, in torch's order."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if kind is None else tuple(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))


def device_facts(device: str) -> DeviceFacts:
    """Return the memory figures of a device."""
    module = stream_module(device)
    if module is None:
        return DeviceFacts(device=device)
    try:
        free, total = module.mem_get_info(device)
    except RuntimeError:
        if module is torch.cuda:
            raise
        return DeviceFacts(device=device)  # some drivers of XPU do not tell
    reserved = module.memory_reserved(device)
    # A process may be limited to a fraction of the device; torch reports it since 2.10.
    fraction = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    allowed = max(0, int(fraction * total) - reserved)
    cached = reserved - module.memory_allocated(device)
    return DeviceFacts(device=device, free_bytes=min(free, allowed), cached_bytes=cached)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of its kind in this thread, as kernels of some libraries need."""
    module = None if device.type == "cpu" else stream_module(str(device))
    return nullcontext() if module is None else module.device(device)


def allocator_bytes(device: str) -> tuple[int, int] | None:
    """Return the bytes that torch's allocator has allocated and reserved on a device; None if unknown."""
    module = stream_module(device)
    return None if module is None else (module.memory_allocated(device), module.memory_reserved(device))


def allocate_on(device: torch.device, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised one-dimensional memory; see ``Accelerator.allocate``."""
    try:
        return torch.empty(count, dtype=dtype, device=device)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise  # some devices report it as a plain RuntimeError
        facts = device_facts(str(device))
        free = "unknown" if facts.free_bytes is None else format_bytes(facts.free_bytes)
        raise BudgetError(
            f"{device} is out of memory: {format_bytes(count * dtype.itemsize)} more were needed, {free} are free and "
            f"{format_bytes(facts.cached_bytes)} are cached by torch in pieces",
        ) from error
