"""Order on a device: work queued before a load, concurrent with it, and started after it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.engine.accelerators import StreamAccelerator
from support.trained_net import empty
from support.watching import watch

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: Cycles of a kernel that spins for about a tenth of a second, longer than these loads take.
LONG = 200_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({f"t{i}": torch.randn(2 * MIB) for i in range(6)}, tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.fixture
def expected(file: Path) -> dict[str, torch.Tensor]:
    state_dict: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return state_dict


def new_stream() -> Any:
    return torch.get_device_module().Stream()


def leave_work_behind(device: str) -> None:
    """Queue writes to memory and free it: the next user of that memory must wait for them."""
    others = [torch.empty(2 * MIB, device=device) for _ in range(6)]
    torch.get_device_module()._sleep(LONG)
    for other in others:
        other.fill_(7.0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "a stream"])
def test_weights_are_there_for_the_next_kernel_and_only_they(
    file: Path, device: str, expected: dict[str, torch.Tensor], own_stream: bool, dtype: torch.dtype | None
) -> None:
    stream = new_stream() if own_stream else torch.get_device_module().current_stream()
    with torch.get_device_module().stream(stream):
        leave_work_behind(device)
        loaded = sluice.load_state_dict(file, device=device, dtype=dtype)
        sums = {name: tensor.clone() for name, tensor in loaded.items()}
    stream.synchronize()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype or tensor.dtype)
        assert torch.equal(sums[name].cpu(), wanted)
        assert torch.equal(loaded[name].cpu(), wanted)


def test_memory_that_another_thread_freed_is_not_written_too_early(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    once = threading.Lock()

    def leave_work_once(*_: object) -> None:
        # This runs in a reader thread, on the default stream, after the load has started.
        if once.acquire(blocking=False):
            leave_work_behind(device)

    watch(monkeypatch, StreamAccelerator, "allocate", leave_work_once)
    loaded = sluice.load_state_dict(file, device=device)
    assert once.locked()
    torch.accelerator.synchronize()
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("where", ["device", "second_device"])
def test_the_callers_stream_and_device_stay_current(
    file: Path, device: str, expected: dict[str, torch.Tensor], request: pytest.FixtureRequest, where: str
) -> None:
    stream = new_stream()
    with torch.get_device_module().stream(stream):
        loaded = sluice.load_state_dict(file, device=request.getfixturevalue(where))
        assert torch.get_device_module().current_stream() == stream
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())
    assert torch.get_device_module().current_stream() == torch.get_device_module().default_stream()
    assert torch.get_device_module().current_device() == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_second_model_is_loaded_while_the_first_computes(
    tmp_path: Path, device: str, dtype: torch.dtype | None
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh())))

    first, second = build().to(device), build()
    torch.save(second.state_dict(), tmp_path / "second.pth")
    tokens, stopped = torch.randn(512, 1024, device=device), threading.Event()

    def compute() -> list[bool]:
        """Repeat a computation; return whether each result is the first one."""
        with torch.no_grad():
            result, equal = first(tokens), list[bool]()
            while not (stopped.is_set() and equal):  # once, on a busy machine
                equal.append(torch.equal(first(tokens), result))
        return equal

    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        try:
            for _ in range(4):
                model = empty(build)
                sluice.load_into(model, tmp_path / "second.pth", device=device, dtype=dtype)
                for name, tensor in second.state_dict().items():
                    assert torch.equal(model.state_dict()[name].cpu(), tensor.to(dtype or tensor.dtype)), name
        finally:
            stopped.set()
    assert computing.result()
    assert all(computing.result())
