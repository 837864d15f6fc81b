"""Fixtures of GPU tests: CUDA or a skip, a context before measurements start, and release of device memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from support.leaks import Holdings

#: Targets of the driver's own descriptors, which it opens at any time.
_DRIVER = tuple(
    f"open descriptor: {place}" for place in ("/dev/", "/proc/", "anon_inode:", "socket:", "pipe:", "/memfd:")
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip if the accelerator is not a CUDA device."""
    if torch.accelerator.is_available() and not torch.cuda.is_available():
        pytest.skip("these tests are about CUDA")


@pytest.fixture(scope="session")
def context() -> None:
    """Create the context of every device, so that it does not count as growth of a test."""
    for number in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{number}").add_(1).item()


@pytest.fixture(autouse=True)
def _no_leaks(context: None) -> Iterator[None]:
    """Fail a test that leaks descriptors, threads or temporary files; the driver's descriptors do not count."""
    before = Holdings.now()
    yield
    left = [line for line in before.left_behind() if not line.startswith(_DRIVER)]
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture
def device(context: None) -> Iterator[str]:
    """Yield the first device with an empty allocator cache; remove its memory limit after the test."""
    _free()
    yield "cuda:0"
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    _free()


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
