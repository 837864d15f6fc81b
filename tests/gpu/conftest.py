"""Fixtures of tests on an accelerator: CUDA, else the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.leaks import Holdings
from support.simulated_device import Simulator

#: Targets of the driver's own descriptors, which it opens at any time.
_DRIVER = tuple(
    f"open descriptor: {place}" for place in ("/dev/", "/proc/", "anon_inode:", "socket:", "pipe:", "/memfd:")
)


@pytest.fixture(autouse=True)
def _no_leaks(context: None) -> Iterator[None]:
    """Fail a test that leaks descriptors, threads or temporary files; the driver's descriptors do not count."""
    before = Holdings.now()
    yield
    left = [line for line in before.left_behind() if not line.startswith(_DRIVER)]
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def _plugged_in(simulator: Simulator | None) -> None:
    """Make the accelerator available to tests that do not ask for its name."""


@pytest.fixture
def sim(simulator: Simulator | None) -> Simulator:
    """Return the controls of the simulated device, or skip."""
    return simulator or pytest.skip("needs the simulated device")
