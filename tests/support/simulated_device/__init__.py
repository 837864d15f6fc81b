"""Two simulated devices, ``sim:0`` and ``sim:1``, that torch takes for accelerators; harsher than a GPU.

- Their memory is apart from the host's: a pointer to it cannot be followed, and it counts for no process.
- Streams run as late as possible: an item runs when something waits for it. With a seed, some items run earlier.
- Copies from page-locked memory read it when they run; copies from other memory have read it when they return.
- The caching allocator follows the documented rules of torch's CUDA allocator, with the same statistics.
- Operators that are not copies, fills or products in place are computed by the CPU, after their stream.

torch has one place for such a device in each process, which stays taken. Until ``plugged_in`` no device is
available, so that the other tests of the process do not see it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from sluice.engine.vendors import VENDORS, Vendor

from .build import library, reason_against
from .torch_module import make_module

__all__ = ["AUTOLOAD", "Simulator", "plug_in", "plugged_in", "prepare", "reason_against"]

_GIB = 1 << 30

#: Folder with an entry point of torch, for programs that use the devices without knowing them: with it and ``tests`` on
#: the path, ``import torch`` plugs them in.
AUTOLOAD = Path(__file__).parent / "autoload"


class Simulator:
    """Control of both devices."""

    def __init__(self, loaded: ctypes.CDLL, module: Any) -> None:
        self._library, self._module = loaded, module

    def plug(self, *, inserted: bool) -> None:
        """Make the devices available to torch, or not."""
        self._module.plugged = inserted
        self._library.sim_plug(int(inserted))

    def reset(self) -> None:
        """Run what is pending, drop planted failures, and return to 8 GiB and the latest schedule."""
        self.fail_copy(None)
        self.fail_allocation(None)
        self.refuse_page_locking(refuse=False)
        self.schedule(None)
        for device in range(2):
            try:
                torch.accelerator.synchronize(device)
            except RuntimeError:
                torch.accelerator.synchronize(device)
            self.set_capacity(device, 8 * _GIB)
            self._library.sim_set_fraction(device, ctypes.c_double(1.0))
        self._library.sim_set_device(0)
        self.take_faults()
        self._library.sim_reset_peak_page_locked()

    def set_capacity(self, device: int, nbytes: int) -> None:
        """Set the size of a device in bytes."""
        self._library.sim_set_capacity(device, ctypes.c_uint64(nbytes))

    def schedule(self, seed: int | None) -> None:
        """Let a seed decide when and in which order streams run; None is as late as possible."""
        self._library.sim_set_schedule(ctypes.c_int64(-1 if seed is None else seed))

    def fail_allocation(self, number: int | None) -> None:
        """Refuse the allocation with this number, counted from 0 on; None refuses none."""
        self._library.sim_fail_allocation(ctypes.c_int64(-1 if number is None else number))

    def fail_copy(self, number: int | None, *, late: bool = False) -> None:
        """Let the copy with this number fail when it is started, or when it runs."""
        self._library.sim_fail_copy(ctypes.c_int64(-1 if number is None else number), int(late))

    def refuse_page_locking(self, *, refuse: bool) -> None:
        """Refuse to page-lock host memory from now on, or accept it again."""
        self._library.sim_refuse_page_locking(int(refuse))

    def lock_pages(self, address: int, nbytes: int) -> int:
        """Page-lock host memory; return 0 or the number of the error that CUDA's runtime would give."""
        return int(self._library.sim_lock_pages(ctypes.c_void_p(address), ctypes.c_uint64(nbytes)))

    def unlock_pages(self, address: int) -> int:
        """Release page-locked memory."""
        return int(self._library.sim_unlock_pages(ctypes.c_void_p(address)))

    def page_locked_bytes(self) -> tuple[int, int]:
        """Return the bytes of page-locked memory, now and at most since the reset."""
        return int(self._library.sim_page_locked()), int(self._library.sim_peak_page_locked())

    def take_faults(self) -> list[str]:
        """Return the faults that did not stop the program, and forget them."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.sim_take_faults(text, ctypes.c_uint64(len(text)))
        return text.value.decode().splitlines()

    def name_host_accesses(self) -> None:
        """Print the kind and place of a host access to device memory before it ends the process."""
        self._library.sim_name_host_accesses()


class _SimulatedVendor(Vendor):
    """Page-locking, as ``cudaHostRegister`` does it."""

    locks_pages = True

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> bool:  # noqa: ARG002
        return self._simulator.lock_pages(address, nbytes) == 0

    def unlock_pages(self, device: torch.device, address: int) -> None:  # noqa: ARG002
        self._simulator.unlock_pages(address)


@cache
def _loaded() -> Simulator:
    path = str(library())
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # of torch
    loaded = ctypes.CDLL(path)
    for name in ("sim_page_locked", "sim_peak_page_locked"):
        getattr(loaded, name).restype = ctypes.c_uint64
    module = make_module(loaded)
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", module)  # type: ignore[no-untyped-call]  # of torch
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    simulator = Simulator(loaded, module)
    simulator.set_capacity(0, 8 * _GIB)  # opens the memory of both, which are not opened during a test
    VENDORS["sim"] = _SimulatedVendor(simulator)
    return simulator


def prepare() -> None:
    """Build and register the devices, which stay unavailable."""
    _loaded()


def plug_in() -> None:
    """Make the devices available for the rest of the process: torch calls this if ``AUTOLOAD`` is on its path."""
    _loaded().plug(inserted=True)


@contextmanager
def plugged_in() -> Iterator[Simulator]:
    """Make ``sim:0`` and ``sim:1`` available during the block, in a fresh state."""
    simulator = _loaded()
    simulator.plug(inserted=True)
    try:
        simulator.reset()
        yield simulator
    finally:
        simulator.reset()
        torch.accelerator.empty_cache()
        simulator.plug(inserted=False)
