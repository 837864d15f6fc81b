"""What GPU tests get: CUDA or a reason, a context that exists before anything is measured, and its memory back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from support.leaks import Holdings

#: Where the driver's own descriptors lead. It opens them when it likes.
_DRIVER = tuple(
    f"open descriptor: {place}" for place in ("/dev/", "/proc/", "anon_inode:", "socket:", "pipe:", "/memfd:")
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where another accelerator than CUDA was found."""
    if torch.accelerator.is_available() and not torch.cuda.is_available():
        pytest.skip("these tests are about CUDA")


@pytest.fixture(scope="session")
def context() -> None:
    """Make the context of every device, so that no test is charged with it."""
    for number in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{number}").add_(1).item()


@pytest.fixture(autouse=True)
def _no_leaks(context: None) -> Iterator[None]:
    """Fail a test that leaves files, threads or temporary files behind; the driver's descriptors are its own affair."""
    before = Holdings.now()
    yield
    left = [line for line in before.left_behind() if not line.startswith(_DRIVER)]
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture
def device(context: None) -> Iterator[str]:
    """Return the first device with nothing cached; afterwards its limit is lifted again."""
    _free()
    yield "cuda:0"
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    _free()


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
