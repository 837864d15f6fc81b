"""Order on a device: work queued before a load, concurrent with it, and started after it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.engine.accelerators import StreamAccelerator
from support.trained_net import empty

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
    allocate = StreamAccelerator.allocate
    once = threading.Lock()

    def after_others(self: StreamAccelerator, count: int, dtype: torch.dtype) -> torch.Tensor:
        # This runs in a reader thread, on the default stream, after the load has started.
        if once.acquire(blocking=False):
            leave_work_behind(device)
        return allocate(self, count, dtype)

    monkeypatch.setattr(StreamAccelerator, "allocate", after_others)
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


class Busy(threading.Thread):
    """Repeats one computation with a model and collects the results that differ from the first."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor) -> None:
        super().__init__(name="busy")
        self._model = model
        self._tokens = tokens
        self.stopped = threading.Event()
        self.rounds = 0
        self.wrong = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                first = self._model(self._tokens)
                while not self.stopped.is_set():
                    self.wrong += not torch.equal(self._model(self._tokens), first)
                    self.rounds += 1
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            self.error = error


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_second_model_is_loaded_while_the_first_computes(
    tmp_path: Path, device: str, dtype: torch.dtype | None
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh())))

    first, second = build(), build()
    torch.save(second.state_dict(), tmp_path / "second.pth")
    expected = second.state_dict()
    busy = Busy(first.to(device), torch.randn(512, 1024, device=device))
    busy.start()
    try:
        for _ in range(4):
            model = empty(build)
            sluice.load_into(model, tmp_path / "second.pth", device=device, dtype=dtype)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor.cpu(), expected[name].to(dtype or tensor.dtype)), name
    finally:
        busy.stopped.set()
        busy.join()
    assert busy.error is None
    assert busy.rounds > 0
    assert busy.wrong == 0
