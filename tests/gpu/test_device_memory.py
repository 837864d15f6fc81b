"""Device memory and page-locked memory after successful and failed loads."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import sluice
from sluice.engine.vendors import VENDORS, vendor
from sluice.reading import transfer as _transfer
from sluice.sources.local import LocalFile
from support.simulated_device import Simulator
from support.watching import watch

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: Shapes of parameters: some of 8 MiB, which waste allocator segments if allocated one by one, and small ones.
SHAPES = {**{f"large{i}": (1024, 2048 + i) for i in range(12)}, **{f"small{i}": (300, i + 1) for i in range(40)}}


def weights(shapes: Mapping[str, tuple[int, ...]], device: str = "meta") -> nn.ParameterDict:
    """Return a module with parameters of the given shapes."""
    return nn.ParameterDict({name: torch.zeros(shape, device=device) for name, shape in shapes.items()})


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


def assert_unlocked(driver: Mock) -> None:
    """Memory was page-locked, and all of it was released."""
    locked = [call.args[1] for call in driver.lock_pages.call_args_list]
    released = [call.args[1] for call in driver.unlock_pages.call_args_list]
    assert sorted(locked) == sorted(released) != []


def assert_untouched(model: nn.Module, before: tuple[int, int], driver: Mock) -> None:
    assert all(parameter.is_meta for parameter in model.parameters())
    assert allocated_and_reserved() == before
    assert_unlocked(driver)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, device: str) -> Mock:
    """Record the calls of the device's vendor."""
    made = Mock(wraps=vendor(device), locks_pages=vendor(device).locks_pages)
    monkeypatch.setitem(VENDORS, torch.device(device).type, made)
    return made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_reserved_memory_is_the_weights_and_a_constant(
    file: Path, device: str, driver: Mock, dtype: torch.dtype | None
) -> None:
    _, before = allocated_and_reserved()
    model = weights(SHAPES)
    report = sluice.load_into(model, file, device=device, dtype=dtype)
    final = sum(parameter.nbytes for parameter in model.parameters())
    grown = torch.get_device_module().max_memory_reserved() - before
    assert final <= grown <= final + 40 * MIB
    (memory,) = report.device_memory
    assert memory.requested_bytes == final
    assert memory.reserved_bytes is not None
    assert memory.reserved_bytes <= memory.predicted_bytes
    assert_holds(model, file)
    assert_unlocked(driver)


@pytest.mark.parametrize("loads", [3, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_many_loads_take_no_more_than_one(file: Path, device: str, dtype: torch.dtype | None, loads: int) -> None:
    found = set()
    for _ in range(loads):
        sluice.load_into(weights(SHAPES), file, device=device, dtype=dtype)
        found.add(allocated_and_reserved())
    assert len(found) == 1


@pytest.mark.parametrize("fits", [0, 2, 5])
def test_out_of_memory_at_any_tensor_leaves_everything_as_it_was(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, driver: Mock, fits: int
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
    model = weights(shapes)
    with pytest.raises(sluice.BudgetError, match=rf"{device} is out of memory: 16\.0 MiB more were needed"):
        sluice.load_into(model, tmp_path / "f.pth", device=device)
    assert_untouched(model, before, driver)


def test_a_limit_that_cannot_be_kept_is_refused_before_reading(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfer, "run", lambda *_, **__: pytest.fail("data was read"))
    model = weights(SHAPES)
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
        sluice.load_into(weights({"t": (count,)}), tmp_path / "f.safetensors", device=device)


def test_a_read_that_fails_midway_leaves_everything_as_it_was(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch, driver: Mock
) -> None:
    numbers = itertools.count(1)

    def fail_at_the_fifth(_: LocalFile, __: int, buffer: memoryview, **___: bool) -> None:
        if len(buffer) >= MIB and next(numbers) == 5:  # the header is read in smaller pieces
            raise sluice.ReadError("the disk is gone")

    watch(monkeypatch, LocalFile, "read_into", fail_at_the_fifth)
    before = allocated_and_reserved()
    model = weights(SHAPES)
    with pytest.raises(sluice.ReadError, match="the disk is gone"):
        sluice.load_into(model, file, device=device)
    assert_untouched(model, before, driver)


def test_a_driver_that_refuses_page_locking_costs_speed_and_nothing_else(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = vendor(device)

    def lock_twice(device: torch.device, address: int, nbytes: int) -> bool:
        # The same address twice: the driver itself refuses, and leaves an error pending.
        assert inner.lock_pages(device, address, nbytes)
        refused = inner.lock_pages(device, address, nbytes)
        inner.unlock_pages(device, address)
        return refused

    refusing = Mock(wraps=inner, locks_pages=True, lock_pages=Mock(side_effect=lock_twice))
    monkeypatch.setitem(VENDORS, torch.device(device).type, refusing)
    model = weights(SHAPES)
    sluice.load_into(model, file, device=device)
    assert torch.ones(3, device=device).sum().item() == 3  # a pending error would be raised here
    assert refusing.lock_pages.called
    assert not refusing.unlock_pages.called
    assert_holds(model, file)


def test_live_parameters_are_filled_in_place(file: Path, device: str) -> None:
    model = weights(SHAPES, device)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = allocated_and_reserved()
    torch.get_device_module().reset_peak_memory_stats()
    sluice.load_into(model, file)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert allocated_and_reserved() == before
    assert torch.get_device_module().max_memory_allocated() == before[0]
    assert_holds(model, file)


def test_live_parameters_of_a_different_dtype_are_replaced_one_by_one(file: Path, device: str) -> None:
    model = weights(SHAPES, device)
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
    refuse = Mock(side_effect=RuntimeError("the driver does not support this query"))
    monkeypatch.setattr(torch.get_device_module(), "mem_get_info", refuse)
    model = weights(SHAPES)
    sluice.load_into(model, file, device=device)
    assert_holds(model, file)
