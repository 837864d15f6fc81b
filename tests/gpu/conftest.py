"""Fixtures of tests on an accelerator: CUDA, else the simulated device; its context, and release of device memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from sluice.engine.accelerators import accelerators
from support.leaks import Holdings
from support.simulated_device import Simulator, plugged_in, prepare

#: Targets of the driver's own descriptors, which it opens at any time.
_DRIVER = tuple(
    f"open descriptor: {place}" for place in ("/dev/", "/proc/", "anon_inode:", "socket:", "pipe:", "/memfd:")
)


@pytest.fixture(scope="session")
def context() -> Iterator[None]:
    """Create the context of every device, so that it does not count as growth of a test."""
    if not torch.cuda.is_available():
        prepare()
    for number in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{number}").add_(1).item()
    gc.freeze()  # each test collects garbage twice, which takes a quarter of a second with all modules in it
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_leaks(context: None) -> Iterator[None]:
    """Fail a test that leaks descriptors, threads or temporary files; the driver's descriptors do not count."""
    before = Holdings.now()
    yield
    left = [line for line in before.left_behind() if not line.startswith(_DRIVER)]
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def simulator(context: None) -> Iterator[Simulator | None]:
    """Plug the simulated devices in for a test and check that it made no fault; None if there is a GPU."""
    with ExitStack() as stack:
        simulated = None if torch.cuda.is_available() else stack.enter_context(plugged_in())
        yield simulated
        if simulated is not None:
            assert not simulated.take_faults()


@pytest.fixture
def device(simulator: Simulator | None) -> Iterator[str]:
    """Yield the first device with an empty allocator cache; remove its memory limit after the test."""
    _free()
    yield accelerators()[0]
    torch.get_device_module().set_per_process_memory_fraction(1.0, 0)
    _free()


@pytest.fixture
def second_device(device: str) -> str:
    """Return the second device, or skip."""
    names = accelerators()
    return names[1] if len(names) > 1 else pytest.skip("needs two devices")


def _free() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.get_device_module().empty_cache()
    torch.get_device_module().reset_peak_memory_stats()
