"""The simulated device itself: every fault that it is made to catch is planted once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from sluice.engine.accelerators import accelerators
from sluice.planning.cuda_allocator import plan_reservation
from support.fresh_process import run
from support.simulated_device import Simulator, plugged_in, prepare, reason_against

REASON = reason_against()
pytestmark = [
    pytest.mark.usefixtures("fresh_processes"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    """Build the devices before the descriptors of a test are counted."""
    prepare()


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with plugged_in() as simulator:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        yield simulator
        assert not simulator.take_faults()


def page_locked(sim: Simulator, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).pin_memory()


def test_the_devices_are_seen_only_while_they_are_plugged_in() -> None:
    assert accelerators() == ()
    with plugged_in():
        assert accelerators() == ("sim:0", "sim:1")
    assert accelerators() == ()


# ---- memory


@pytest.mark.parametrize(
    ("access", "text"),
    [
        ("ctypes.string_at(address + 40, 1)", "the host read memory of sim:1 at 0x"),
        ("ctypes.memset(address + 40, 0, 1)", "the host wrote to memory of sim:1 at 0x"),
    ],
    ids=["read", "write"],
)
def test_the_host_cannot_touch_device_memory(access: str, text: str) -> None:
    code = f"""
import ctypes, torch
from support.simulated_device import plugged_in
with plugged_in() as sim:
    sim.name_host_accesses()
    tensor = torch.zeros(1000, device="sim:1")
    torch.accelerator.synchronize("sim:1")
    address = tensor.data_ptr()
    print("ready", flush=True)
    {access}
    print("survived")
"""
    process = run(code)
    assert process.stdout == "ready\n"
    assert process.returncode < 0
    assert text in process.stderr


def test_files_cannot_be_read_into_device_memory(sim: Simulator, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 16)
    tensor = torch.zeros(16, dtype=torch.uint8, device="sim")
    raw = (ctypes.c_char * 16).from_address(tensor.data_ptr())
    with (tmp_path / "f").open("rb", buffering=0) as file, pytest.raises(OSError, match="Bad address"):
        file.readinto(raw)


def test_device_memory_does_not_count_for_the_process() -> None:
    code = """
import torch
from support.simulated_device import plugged_in
from sluice.machine.peaks import PeakMeter
with plugged_in():
    torch.ones(1 << 20).to("sim").cpu()
    source = torch.ones(1 << 20)
    with PeakMeter() as meter:
        kept = [source.to("sim") for _ in range(64)]
        kept[0].mul_(2)
        torch.accelerator.synchronize()
    print(torch.accelerator.memory_allocated() >> 20, meter.peaks.total_bytes >> 20)
"""
    process = run(code)
    assert not process.returncode, process.stderr
    allocated, grown = map(int, process.stdout.split())
    assert allocated == 256
    assert grown <= 16


def test_out_of_memory_is_torchs_own_error(sim: Simulator) -> None:
    sim.set_capacity(0, 64 * MIB)
    held = torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 31457280 bytes on sim:0"):
        torch.empty(30 * MIB, dtype=torch.uint8, device="sim")
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="sim:1").numel()  # each device has its own
    del held
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="sim").numel()  # what is cached is released first
    assert torch.accelerator.memory_stats(0)["num_alloc_retries"] >= 1


def test_a_fraction_of_the_device_is_a_limit(sim: Simulator) -> None:
    sim.set_capacity(0, 100 * MIB)
    torch.get_device_module().set_per_process_memory_fraction(0.5, 0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(60 * MIB, dtype=torch.uint8, device="sim")
    assert torch.empty(50 * MIB, dtype=torch.uint8, device="sim").numel()


def test_new_memory_is_not_zero(sim: Simulator) -> None:
    assert torch.empty(1000, dtype=torch.uint8, device="sim").cpu().tolist() == [0xA5] * 1000


# ---- the allocator


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB - 512] * 2, 20 * MIB, 20 * MIB),  # the second gets the last KiB as well
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),
        ([3 * MIB] * 7, 21 * MIB, 40 * MIB),
        ([19 * MIB // 2, 19 * MIB // 2, 2 * MIB], 22 * MIB, 40 * MIB),  # the last MiB of a segment is not used
    ],
)
def test_sizes_are_rounded_and_packed_as_cudas_allocator_does(
    sim: Simulator, sizes: list[int], allocated: int, reserved: int
) -> None:
    held = [torch.empty(size, dtype=torch.uint8, device="sim") for size in sizes]
    stats = torch.accelerator.memory_stats(0)
    assert stats["requested_bytes.all.current"] == sum(sizes)
    assert (stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]) == (allocated, reserved)
    del held
    assert torch.accelerator.memory_reserved(0) == reserved
    assert torch.accelerator.memory_stats(0)["inactive_split_bytes.all.current"] == 0  # joined again
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == 0
    assert torch.accelerator.max_memory_reserved(0) == reserved
    assert torch.get_device_module().mem_get_info(0) == (8 << 30, 8 << 30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 3000), st.integers(MIB // 2, 30 * MIB)), max_size=25),
    one_block=st.booleans(),
)
def test_the_planners_arithmetic_is_that_of_the_allocator(sim: Simulator, sizes: list[int], one_block: bool) -> None:
    torch.accelerator.empty_cache()
    predicted = plan_reservation(sizes, one_block=one_block)
    torch.empty(predicted.block_bytes, dtype=torch.uint8, device="sim")
    held = [torch.empty(size, dtype=torch.uint8, device="sim") for size in sizes]
    found = torch.accelerator.memory_reserved(0), torch.accelerator.memory_allocated(0)
    del held  # before an assertion that keeps it
    assert found[0] == predicted.reserved_bytes
    assert found[1] >= predicted.allocated_bytes
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == 0


def test_a_cached_block_belongs_to_its_stream(sim: Simulator) -> None:
    with torch.Stream(device="sim"):
        torch.empty(12 * MIB, dtype=torch.uint8, device="sim")
    held = torch.empty(12 * MIB, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_reserved(0) == 24 * MIB
    del held


def test_an_allocation_can_be_refused(sim: Simulator) -> None:
    sim.fail_allocation(2)
    held = [torch.empty(1, device="sim") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="sim")
    assert torch.empty(1, device="sim").numel() == len(held) // 2


# ---- order


def test_a_copy_from_page_locked_memory_reads_it_late(sim: Simulator) -> None:
    source, target = page_locked(sim, 100_000), torch.empty(100_000, device="sim")
    target.copy_(source, non_blocking=True)
    source.fill_(-1)  # the fault: nothing has waited for the copy
    assert target.cpu().eq(-1).all()


@pytest.mark.parametrize("count", [100, 100_000])
def test_a_copy_from_other_memory_has_read_it_when_it_returns(sim: Simulator, count: int) -> None:
    source = torch.arange(count, dtype=torch.float32)
    target = torch.empty(count, device="sim")
    target.copy_(source, non_blocking=True)
    source.fill_(-1)
    assert torch.equal(target.cpu(), torch.arange(count, dtype=torch.float32))


def test_a_copy_to_page_locked_memory_arrives_late(sim: Simulator) -> None:
    source, target = torch.ones(1000, device="sim"), torch.zeros(1000).pin_memory()
    target.copy_(source, non_blocking=True)
    assert not target.any()
    torch.accelerator.synchronize()
    assert target.all()


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_sees_old_bytes(sim: Simulator, waits: bool) -> None:
    tensor = torch.zeros(1000, device="sim")
    torch.accelerator.synchronize()
    tensor.fill_(1)
    side = torch.Stream(device="sim")
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        seen = tensor.cpu()
    assert bool(seen.all()) is waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_freed_under_another_streams_work_is_used_again(sim: Simulator, recorded: bool) -> None:
    side = torch.Stream(device="sim")
    source = torch.ones(3 * MIB, device="sim")
    torch.accelerator.synchronize()
    with side:
        seen = torch.empty(3 * MIB, device="sim")
        seen.copy_(source)
    if recorded:
        source.record_stream(side)
    del source
    other = torch.full((3 * MIB,), 2.0, device="sim")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert seen.cpu().eq(1).all() == recorded
    del other


def test_an_event_fires_when_its_work_has_run(sim: Simulator) -> None:
    tensor = torch.zeros(10, device="sim")
    event = torch.accelerator.current_stream().record_event()
    later = tensor.fill_(1)
    assert sim.pending() == 2
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert sim.pending() == 1
    assert later.cpu().all()


def order(sim: Simulator, seed: int) -> list[float]:
    """Return the last of several streams to write each of some tensors."""
    sim.schedule(seed)
    tensors = [torch.zeros(1, device="sim") for _ in range(12)]
    torch.accelerator.synchronize()
    streams = [torch.Stream(device="sim") for _ in range(4)]
    for number, stream in enumerate(streams):
        with stream:
            for tensor in tensors:
                tensor.fill_(number)
    torch.accelerator.synchronize()
    return [tensor.item() for tensor in tensors]


def test_a_seed_decides_the_order_between_streams(sim: Simulator) -> None:
    orders = [order(sim, seed) for seed in range(6)]
    assert len({tuple(each) for each in orders}) > 1
    assert order(sim, 3) == order(sim, 3)


def test_released_page_locked_memory_that_a_copy_needs_is_a_fault(sim: Simulator) -> None:
    source, target = torch.ones(5000), torch.empty(5000, device="sim")
    assert sim.lock_pages(source.data_ptr(), source.nbytes) == 0
    assert sim.lock_pages(source.data_ptr(), source.nbytes) == 712
    target.copy_(source, non_blocking=True)
    assert sim.unlock_pages(source.data_ptr()) == 0
    assert sim.take_faults() == ["page-locked memory was released while a copy still used it"]
    assert sim.unlock_pages(source.data_ptr()) == 713
    assert sim.page_locked_bytes() == (0, 20_000)


def test_page_locking_can_be_refused(sim: Simulator) -> None:
    sim.refuse_page_locking(refuse=True)
    source = torch.ones(5000)
    assert sim.lock_pages(source.data_ptr(), source.nbytes) == 1
    assert not source.is_pinned()


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_can_fail_when_it_starts_or_when_it_runs(sim: Simulator, late: bool) -> None:
    source, target = page_locked(sim, 1000), torch.empty(1000, device="sim")
    sim.fail_copy(1, late=late)
    target.copy_(source, non_blocking=True)
    if late:
        target.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match="a copy failed"):
        torch.accelerator.synchronize() if late else target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()  # reported once


# ---- operators


def test_views_casts_and_arithmetic_are_those_of_the_cpu(sim: Simulator) -> None:
    host = torch.randn(40, 30)
    ours = host.to("sim")
    for function in (
        lambda t: t.t().contiguous(),
        lambda t: t[3:20, ::2],
        lambda t: t.to(torch.bfloat16).float() * 3,
        lambda t: t.to(torch.complex64).conj().mul(1j),
        lambda t: t.view(30, 40).unfold(1, 3, 2),
        lambda t: t.clone().mul_(t).fill_diagonal_(2),
        lambda t: torch.stack([t, t]).sum(0) @ t.t(),
        lambda t: t.view(torch.int32) >> 3,
        lambda t: torch.empty(0, device=t.device).set_(t.untyped_storage(), 7, (5, 4), (6, 1)),
        lambda t: t.clone().resize_(50, 30)[:40],
        lambda t: t.expand(2, 40, 30).double(),
    ):
        expected, found = function(host), function(ours)
        assert (found.device.type, found.stride()) == ("sim", expected.stride())
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(ours.to("sim:1").cpu(), host)
    host.copy_(ours.t().to(torch.float16).t() + 1)
    assert torch.equal(host, ours.half().add(1).float().cpu())


def test_a_model_trains_as_on_the_cpu(sim: Simulator) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50), nn.GELU()).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.randint(0, 50, (4, 7)).to(device)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(trained("sim:1"), trained("cpu"))


def test_each_thread_has_its_own_device_and_stream(sim: Simulator) -> None:
    seen: list[object] = []
    with torch.accelerator.device_index(1), torch.Stream(device="sim:1"):
        thread = threading.Thread(
            target=lambda: seen.extend((torch.accelerator.current_device_index(), torch.accelerator.current_stream()))
        )
        thread.start()
        thread.join()
        assert torch.accelerator.current_device_index() == 1
    assert seen == [0, torch.get_device_module().default_stream(0)]
