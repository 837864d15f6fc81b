"""Functions of one kind of device: page-locking of the caller's host memory, and events that sleep.

Torch has no common interface for them. Everything else that ``StreamAccelerator`` needs is the same for every device:
``torch.Stream``, ``torch.Event``, and the functions that the modules of devices share (``torch.cuda``, ``torch.xpu``).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

__all__ = ["VENDORS", "Vendor", "stream_module", "vendor"]

#: ``cudaHostRegisterPortable``: page-locked for every device of the process.
_PORTABLE = 1


class Vendor:
    """The functions of one kind of device, for which torch has none that page-locks memory of the caller.

    Every method may be called from any thread.
    """

    #: Whether memory can be page-locked, so that copies from it may continue after the call.
    locks_pages = False

    def event(self, device: torch.device) -> torch.Event:
        """Return a new event. Waiting for it should not take a core."""
        return torch.Event(device, enable_timing=False)

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> bool:  # noqa: ARG002
        """Page-lock host memory for all devices of the process; return whether the driver accepts it."""
        return False

    def unlock_pages(self, device: torch.device, address: int) -> None:
        """Release memory that was page-locked; do nothing if it is not."""


class CudaVendor(Vendor):
    """CUDA: ``cudaHostRegister`` and events with ``cudaEventBlockingSync``."""

    locks_pages = True

    def event(self, device: torch.device) -> torch.Event:  # noqa: ARG002  (that of the stream which records it)
        # Blocking, so that waiting readers leave the cores to threads that cast. torch.Event ignores the argument.
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> bool:
        with torch.cuda.device(device):
            locked = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE)) == 0
        if not locked:
            _forget_last_error()
        return locked

    def unlock_pages(self, device: torch.device, address: int) -> None:
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostUnregister(address))
        if code:
            _forget_last_error()


#: Devices with functions of their own, by type.
VENDORS: dict[str, Vendor] = {"cuda": CudaVendor()}

_OTHER = Vendor()


def vendor(device: str) -> Vendor:
    """Return the functions of the kind of a device."""
    return VENDORS.get(_kind(device), _OTHER)


def stream_module(device: str) -> Any:
    """Return the module of torch for a device by name, such as ``torch.cuda``; None if the device has no streams.

    Streams and events of a device are made by its module: an event of CUDA takes any other stream for one, unchecked.
    """
    kind = _kind(device)
    module = None if kind == "cpu" else getattr(torch, kind, None)
    return module if hasattr(module, "Stream") and hasattr(module, "mem_get_info") else None


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_last_error() -> None:
    """Clear the error of the CUDA runtime, which the next kernel would report; a checked failure clears it."""
    with suppress(RuntimeError):
        torch.cuda.set_device(torch.cuda.device_count())
