"""Device memory and page-locked memory after successful and failed loads."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice.engine.vendors import VENDORS, Vendor, vendor
from sluice.reading import transfer as _transfer
from sluice.sources.local import LocalFile
from support.simulated_device import Simulator

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: Shapes of parameters: some of 8 MiB, which waste allocator segments if allocated one by one, and small ones.
SHAPES = {**{f"large{i}": (1024, 2048 + i) for i in range(12)}, **{f"small{i}": (300, i + 1) for i in range(40)}}


class Weights(nn.Module):
    """A module with parameters of the given shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: str = "meta") -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({name: torch.randn(shape) for name, shape in SHAPES.items()}, tmp_path / "f.pth")
    return tmp_path / "f.pth"


def assert_holds(model: nn.Module, file: Path) -> None:
    expected = torch.load(file, weights_only=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name].to(parameter.dtype)), name


def allocated_and_reserved() -> tuple[int, int]:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.get_device_module().memory_allocated(), torch.get_device_module().memory_reserved()


class Registrations:
    """Wraps the functions of the device's vendor and records the page-locked addresses."""

    def __init__(self, inner: Vendor) -> None:
        self.inner = inner
        self.locks_pages = inner.locks_pages
        self.locked: set[int] = set()
        self.total = 0

    def event(self, device: torch.device) -> torch.Event:
        return self.inner.event(device)

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> bool:
        accepted = self.inner.lock_pages(device, address, nbytes)
        if accepted:
            self.locked.add(address)
            self.total += 1
        return accepted

    def unlock_pages(self, device: torch.device, address: int) -> None:
        self.inner.unlock_pages(device, address)
        self.locked.remove(address)


def assert_untouched(model: nn.Module, before: tuple[int, int], registrations: Registrations) -> None:
    assert all(parameter.is_meta for parameter in model.parameters())
    assert allocated_and_reserved() == before
    assert registrations.total > 0
    assert not registrations.locked


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch, device: str) -> Registrations:
    made = Registrations(vendor(device))
    monkeypatch.setitem(VENDORS, torch.device(device).type, made)
    return made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_reserved_memory_is_the_weights_and_a_constant(
    file: Path, device: str, registrations: Registrations, dtype: torch.dtype | None
) -> None:
    _, before = allocated_and_reserved()
    model = Weights(SHAPES)
    report = sluice.load_into(model, file, device=device, dtype=dtype)
    final = sum(parameter.nbytes for parameter in model.parameters())
    grown = torch.get_device_module().max_memory_reserved() - before
    assert final <= grown <= final + 40 * MIB
    (memory,) = report.device_memory
    assert memory.requested_bytes == final
    assert memory.reserved_bytes is not None
    assert memory.reserved_bytes <= memory.predicted_bytes
    assert_holds(model, file)
    assert registrations.total > 0
    assert not registrations.locked


@pytest.mark.parametrize("loads", [3, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_many_loads_take_no_more_than_one(file: Path, device: str, dtype: torch.dtype | None, loads: int) -> None:

    def load() -> None:
        sluice.load_into(Weights(SHAPES), file, device=device, dtype=dtype)

    load()
    once = allocated_and_reserved()
    for _ in range(loads - 1):
        load()
    assert allocated_and_reserved() == once


@pytest.mark.parametrize("fits", [0, 2, 5])
def test_out_of_memory_at_any_tensor_leaves_everything_as_it_was(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, registrations: Registrations, fits: int
) -> None:
    shapes = {f"t{i}": (4 * MIB,) for i in range(6)}
    torch.save({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "f.pth")
    before = allocated_and_reserved()
    room = before[1] + fits * 16 * MIB + 8 * MIB
    torch.get_device_module().set_per_process_memory_fraction(
        room / torch.get_device_module().mem_get_info(device)[1], device
    )
    # Free memory is tested elsewhere: here the allocator itself must refuse.
    monkeypatch.setattr("sluice.planning.budget.shortages", lambda *_: ())
    model = Weights(shapes)
    with pytest.raises(sluice.BudgetError, match=rf"{device} is out of memory: 16\.0 MiB more were needed"):
        sluice.load_into(model, tmp_path / "f.pth", device=device)
    assert_untouched(model, before, registrations)


def test_a_limit_that_cannot_be_kept_is_refused_before_reading(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "run", lambda *_, **__: pytest.fail("data was read"))
    model = Weights(SHAPES)
    with pytest.raises(sluice.BudgetError, match=rf"memory of {device}.*at most 10\.0 MiB"):
        sluice.load_into(model, file, device=device, memory=sluice.MemoryLimits(device="10MiB"))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_the_device_does_not_have_is_refused_before_reading(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, _ = torch.get_device_module().mem_get_info(device)
    count = free // 4 + 64 * MIB
    header = f'{{"t":{{"dtype":"F32","shape":[{count}],"data_offsets":[0,{count * 4}]}}}}'.encode()
    with (tmp_path / "f.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + count * 4)  # a hole in the file: it must not be read
    monkeypatch.setattr(_transfer, "run", lambda *_, **__: pytest.fail("data was read"))
    with pytest.raises(sluice.BudgetError, match=rf"memory of {device}.*free on the device"):
        sluice.load_into(Weights({"t": (count,)}), tmp_path / "f.safetensors", device=device)


def test_a_read_that_fails_midway_leaves_everything_as_it_was(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch, registrations: Registrations
) -> None:
    read_into = LocalFile.read_into
    numbers = itertools.count(1)

    def fail_at_the_fifth(self: LocalFile, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if len(buffer) >= MIB and next(numbers) == 5:  # the header is read in smaller pieces
            raise sluice.ReadError("the disk is gone")
        return read_into(self, offset, buffer, direct=direct)

    monkeypatch.setattr(LocalFile, "read_into", fail_at_the_fifth)
    before = allocated_and_reserved()
    model = Weights(SHAPES)
    with pytest.raises(sluice.ReadError, match="the disk is gone"):
        sluice.load_into(model, file, device=device)
    assert_untouched(model, before, registrations)


def test_a_driver_that_refuses_page_locking_costs_speed_and_nothing_else(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Registrations):
        def lock_pages(self, device: torch.device, address: int, nbytes: int) -> bool:
            # The same address twice: the driver itself refuses, and leaves an error pending.
            assert super().lock_pages(device, address, nbytes)
            refused = super().lock_pages(device, address, nbytes)
            super().unlock_pages(device, address)
            return refused

    refusing = Refusing(vendor(device))
    monkeypatch.setitem(VENDORS, torch.device(device).type, refusing)
    model = Weights(SHAPES)
    sluice.load_into(model, file, device=device)
    assert torch.ones(3, device=device).sum().item() == 3  # a pending error would be raised here
    assert not refusing.locked
    assert_holds(model, file)


def test_live_parameters_are_filled_in_place(file: Path, device: str) -> None:
    model = Weights(SHAPES, device)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = allocated_and_reserved()
    torch.get_device_module().reset_peak_memory_stats()
    sluice.load_into(model, file)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert allocated_and_reserved() == before
    assert torch.get_device_module().max_memory_allocated() == before[0]
    assert_holds(model, file)


def test_live_parameters_of_a_different_dtype_are_replaced_one_by_one(file: Path, device: str) -> None:
    model = Weights(SHAPES, device)
    before, _ = allocated_and_reserved()
    torch.get_device_module().reset_peak_memory_stats()
    sluice.load_into(model, file, dtype=torch.bfloat16)
    final = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.get_device_module().max_memory_allocated() <= before + final + 32 * MIB
    assert allocated_and_reserved()[0] == pytest.approx(before - final, abs=512 * len(SHAPES))
    assert_holds(model, file)


def test_measure_reports_the_growth_of_each_device(file: Path, device: str) -> None:
    before, reserved = allocated_and_reserved()
    with sluice.measure() as memory:
        loaded = sluice.load_state_dict(file, device=device)
    grown = torch.get_device_module().memory_allocated() - before
    (found,) = [each for each in memory.report.devices if each.device == device]
    assert found.allocated_bytes >= grown >= sum(tensor.nbytes for tensor in loaded.values())
    assert found.reserved_bytes == torch.get_device_module().max_memory_reserved() - reserved


def test_a_driver_that_does_not_tell_its_free_memory_is_no_obstacle(
    file: Path, device: str, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("the driver does not support this query")

    monkeypatch.setattr(torch.get_device_module(), "mem_get_info", refuse)
    model = Weights(SHAPES)
    sluice.load_into(model, file, device=device)
    assert_holds(model, file)
