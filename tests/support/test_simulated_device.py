"""The simulated device itself: faults of access and order that it is made to show are planted once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.planning.cuda_allocator import plan_reservation
from support.fresh_process import run
from support.simulated_device import Simulator, reason_against

REASON = reason_against()
pytestmark = [
    pytest.mark.usefixtures("fresh_processes"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

MIB = 1 << 20


@pytest.fixture
def sim(device: str, simulator: Simulator | None) -> Simulator:
    """Return the controls of the simulated devices, whose allocators have nothing cached."""
    return simulator or pytest.skip("the accelerator of this machine is tested in place of a simulated one")


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


def test_new_memory_is_not_zero(sim: Simulator) -> None:
    assert torch.empty(1000, dtype=torch.uint8, device="sim").cpu().tolist() == [0xA5] * 1000


# ---- the allocator


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


# ---- order


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
