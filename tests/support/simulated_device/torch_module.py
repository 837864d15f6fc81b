"""The module ``torch.sim``: what torch and its users expect of a device, with the names of ``torch.cuda``."""

from __future__ import annotations

import ctypes
import types
from contextlib import AbstractContextManager
from typing import Any

import torch

_NAMES = (
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "synchronize",
)


class Stream(torch.Stream):
    """A stream of a simulated device; a class of its own, as CUDA's is, with methods that tests can replace."""

    def wait_stream(self, stream: torch.Stream) -> None:
        super().wait_stream(stream)


class _Module(types.ModuleType):
    """Functions that torch looks up by name; those of the allocator are torch's own for any accelerator."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("torch.sim")
        self._library = library
        self.plugged = False
        self.Stream, self.Event = Stream, torch.Event
        for name in _NAMES:
            setattr(self, name, getattr(torch.accelerator, name))

    def is_available(self) -> bool:
        return self.plugged

    is_initialized = is_available

    def device_count(self) -> int:
        return 2 if self.plugged else 0

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def default_stream(self, device: Any = None) -> torch.Stream:
        current = torch.accelerator.current_stream(_index(device))
        return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)

    def device(self, device: Any) -> AbstractContextManager[None]:
        return torch.accelerator.device_index(_index(device))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream  # a stream is its own context

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self._library.sim_set_fraction(_index(device), ctypes.c_double(fraction))

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return float(self._library.sim_fraction(_index(device)))

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(name="simulated device", total_memory=self.mem_get_info(device)[1])

    def _sleep(self, cycles: int) -> None:
        """Do nothing: what is queued runs late anyway."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the CPU's generator makes the numbers."""

    def _is_in_bad_fork(self) -> bool:
        return False


def make_module(library: ctypes.CDLL) -> _Module:
    """Return the module for a loaded extension."""
    library.sim_fraction.restype = ctypes.c_double
    return _Module(library)


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    return device if isinstance(device, int) else torch.device(device).index or 0
