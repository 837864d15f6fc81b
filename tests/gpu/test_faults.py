"""Failures at every point of a load to a simulated device: nothing stays reserved, locked or queued."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import rules
from sluice.engine.accelerators import StreamAccelerator
from sluice.engine.staging import StagingPool
from sluice.reading import transfer
from support.simulated_device import Simulator

pytestmark = pytest.mark.gpu

MIB = 1 << 20

SHAPES = {"matrix": (700, 500), "other": (300, 1000), "vector": (999,), "scalar": (), "wide": (3, 200_000)}


def model_of(device: str = "meta", seed: int = 0) -> nn.ParameterDict:
    torch.manual_seed(seed)
    return nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape).to(device), requires_grad=False) for name, shape in SHAPES.items()}
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(model_of("cpu").state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


def load(model: nn.Module, file: Path, device: str) -> None:
    """Load with casts on the device, and a product and a transposition there."""
    sluice.load_into(
        model,
        file,
        device=device,
        dtype=torch.float64,
        rules=[rules.scale("vector", 2.0)],
        memory=sluice.MemoryLimits(staging="1MiB"),
    )


def holdings(sim: Simulator) -> tuple[int, int, int]:
    """Return allocated, reserved and page-locked bytes, with nothing queued."""
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved(), sim.page_locked_bytes()[0]


def assert_unchanged(sim: Simulator, model: nn.Module, before: tuple[int, int, int]) -> None:
    assert all(parameter.is_meta for parameter in model.parameters())
    assert holdings(sim) == before
    assert not sim.take_faults()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sluice")]


def until_it_succeeds(file: Path, device: str, sim: Simulator, plant: Callable[[int], None], error: type) -> int:
    """Load with a failure at each number until the number is not reached; return how many failed."""
    before = holdings(sim)
    for number in range(1000):
        model = model_of()
        plant(number)
        with suppress(error):  # the error is dropped before memory is counted: its frames refer to tensors
            load(model, file, device)
            plant(1 << 30)
            expected = model_of("cpu")
            for name, parameter in model.items():
                assert torch.equal(parameter.cpu(), expected[name].double() * (2 if name == "vector" else 1))
            return number
        assert_unchanged(sim, model, before)
    pytest.fail("the load never succeeded")


def test_whichever_allocation_is_refused(file: Path, device: str, sim: Simulator) -> None:
    # A load continues without the one block: the tensors are allocated one by one.
    model = model_of()
    sim.fail_allocation(0)
    load(model, file, device)
    del model
    torch.accelerator.empty_cache()

    def plant(number: int) -> None:
        sim.fail_allocation(number + 1)

    assert until_it_succeeds(file, device, sim, plant, sluice.BudgetError) >= len(SHAPES)


@pytest.mark.parametrize("late", [False, True], ids=["when it starts", "when it runs"])
def test_whichever_copy_fails(file: Path, device: str, sim: Simulator, late: bool) -> None:
    def plant(number: int) -> None:
        sim.fail_copy(number, late=late)

    assert until_it_succeeds(file, device, sim, plant, RuntimeError) >= len(SHAPES)


class Interrupt:
    """Sends SIGINT at the call of a Python function with a given number while a plan runs, in the thread that loads."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        self.running = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is transfer.run.__code__:
            self.running = event == "call"
        elif self.running and event == "call":
            self.calls += 1
            if self.calls == self.number:
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.long)])
def test_whenever_the_load_is_interrupted(
    file: Path, device: str, sim: Simulator, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    swallowed: list[Any] = []  # Python ignores exceptions while it ends a generator that is no longer used
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: swallowed.append(unraisable.exc_type))
    load(model_of(), file, device)  # imports are done
    torch.accelerator.empty_cache()
    before = holdings(sim)
    number = 1
    while True:
        model, interrupt = model_of(), Interrupt(number)
        with suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            try:
                load(model, file, device)
            finally:
                sys.setprofile(None)
        if interrupt.calls < number:
            assert number > 500
            return
        if swallowed:
            assert swallowed == [KeyboardInterrupt]
            swallowed.clear()
            del model
            torch.accelerator.empty_cache()
        else:
            assert_unchanged(sim, model, before)
        number += step


# ---- faults of the engine, which the device has to show


def forget_tickets(patch: pytest.MonkeyPatch) -> None:
    give_back = StagingPool.give_back

    def forgetful(self: StagingPool, buffer: object) -> None:
        buffer.tickets.clear()  # type: ignore[attr-defined]
        give_back(self, buffer)  # type: ignore[arg-type]

    patch.setattr(StagingPool, "give_back", forgetful)


def no_last_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamAccelerator, "finish", lambda _: None)


@pytest.mark.parametrize("fault", [forget_tickets, no_last_wait])
def test_staging_that_is_used_or_freed_too_early_is_noticed(
    file: Path,
    device: str,
    sim: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    def arrived() -> bool:
        loaded = sluice.load_state_dict(file, device=device, memory=sluice.MemoryLimits(staging="1MiB"))
        expected = model_of("cpu")
        return all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())

    assert arrived()
    with monkeypatch.context() as patch:
        fault(patch)
        assert not arrived() or sim.take_faults()
    torch.accelerator.synchronize()


def test_a_live_tensor_that_queued_work_reads_is_filled_after_it(
    file: Path, device: str, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen_before_the_load() -> bool:
        model = model_of(device, seed=1)
        torch.accelerator.synchronize()
        seen = {name: parameter.clone() for name, parameter in model.items()}  # queued
        sluice.load_into(model, file)
        expected = model_of("cpu", seed=1)
        return all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in seen.items())

    assert seen_before_the_load()
    monkeypatch.setattr(torch.get_device_module().Stream, "wait_stream", lambda *_: None)
    assert not seen_before_the_load()
