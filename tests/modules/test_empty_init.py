"""Modules built without memory: tensors on meta, ties, and tensors that stay real."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sluice.modules import empty_init as empty_init_module
from sluice.modules.empty_init import empty_init
from support import fresh_process


@pytest.mark.parametrize("size", [4, 1 << 18])
def test_buffers_shared_by_modules_stay_one_object_and_the_callers_tensor_is_untouched(size: int) -> None:
    table = torch.arange(float(size))
    with empty_init():
        one, other, late = nn.Module(), nn.Module(), nn.Module()
        one.register_buffer("table", table)
        other.table = nn.Buffer(torch.zeros(size), persistent=True)
        other.register_buffer("again", table)
        late.register_buffer("table", table, persistent=False)
        assert one.table.is_meta == (size > 4)
    assert one.table is other.again
    assert one.table.is_meta
    assert other.table.is_meta
    assert isinstance(other.table, nn.Buffer)
    assert late.table is table
    assert torch.equal(table, torch.arange(float(size)))


def test_parameters_from_outside_stay_real() -> None:
    trained = nn.Linear(3, 3)
    before = trained.weight.clone()
    with empty_init():
        student = nn.Linear(3, 3)
        student.weight = trained.weight
        twin = copy.deepcopy(trained)
    assert student.weight is trained.weight
    assert torch.equal(trained.weight, before)
    assert torch.equal(twin.weight, before)
    assert student.bias.is_meta


def test_a_parameter_held_by_a_weak_reference_stays_real_and_tied() -> None:
    with empty_init():
        weight = nn.Parameter(torch.ones(3) * 2)
        reference = weakref.ref(weight)
        one, other = nn.Module(), nn.Module()
        one.weight = weight
        other.weight = weight
    assert one.weight is other.weight is reference()
    assert not one.weight.is_meta


def test_contexts_nest_and_exceptions_restore_torch_and_the_garbage_collector() -> None:
    originals = (nn.Parameter.__new__, nn.Module.register_parameter, nn.Module.register_buffer)

    def fail_inside() -> None:
        with empty_init():
            with empty_init():
                assert nn.Linear(2, 2).weight.is_meta
            assert nn.Linear(2, 2).weight.is_meta
            assert nn.Module.register_buffer is not originals[2]
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not nn.Linear(2, 2).weight.is_meta
    assert (nn.Parameter.__new__, nn.Module.register_parameter, nn.Module.register_buffer) == originals
    assert empty_init_module._contexts == 0
    assert gc.isenabled()


def test_a_wrapper_installed_inside_the_context_survives_it() -> None:
    original = nn.Module.register_buffer
    inner: Callable[..., None] | None = None

    def wrapper(*args: object, **options: object) -> None:
        assert inner is not None
        inner(*args, **options)

    try:
        with empty_init():
            inner = nn.Module.register_buffer
            nn.Module.register_buffer = wrapper  # type: ignore[method-assign]
        assert nn.Module.register_buffer is wrapper
        assert not nn.BatchNorm1d(2).running_mean.is_meta  # type: ignore[union-attr]
    finally:
        nn.Module.register_buffer = original  # type: ignore[method-assign]


def test_other_threads_are_not_affected() -> None:
    inside, built = threading.Event(), threading.Event()
    made: list[nn.Module] = []

    def build_outside() -> None:
        inside.wait(10)
        made.append(nn.BatchNorm1d(3))
        with empty_init():
            made.append(nn.Linear(3, 3))
        made.append(nn.Linear(3, 3))
        built.set()

    thread = threading.Thread(target=build_outside)
    thread.start()
    with empty_init():
        inside.set()
        assert built.wait(10)
        mine = nn.Linear(3, 3)
    thread.join()
    assert mine.weight.is_meta
    assert [any(t.is_meta for t in module.state_dict().values()) for module in made] == [False, True, False]


@pytest.mark.parametrize("depth", [1, 40])
def test_memory_does_not_grow_with_the_number_of_layers(depth: int) -> None:
    largest = 0
    made: list[StorageWeakRef] = []  # Python's weak references live on in torch 2.6 when the memory is freed

    class Layer(nn.Module):
        def __init__(self) -> None:
            nonlocal largest
            super().__init__()
            values = torch.randn(64, 64)
            made.append(StorageWeakRef(values.untyped_storage()))  # type: ignore[no-untyped-call]
            largest = max(largest, sum(not storage.expired() for storage in made))  # type: ignore[no-untyped-call]
            self.weight = nn.Parameter(values)

    with empty_init():
        nn.Sequential(*(Layer() for _ in range(depth)))
    assert largest == 1


_BUILD_AND_MEASURE = """
import resource, sys, torch
from sluice.modules.empty_init import empty_init

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

def build(layers):
    for number in range(layers):
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Embedding(64, 64))
        layer.register_buffer("mask", torch.triu(torch.ones(1024, 1024), diagonal=1))
        layer.drawn = torch.nn.Parameter(torch.randn(1000 + 8 * number, 900))
        yield layer

list(build(1))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with empty_init():
    model = torch.nn.Sequential(*build(48))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
print(status("VmHWM") - before, status("VmRSS") - before, int("torch._dynamo" in sys.modules), faults)
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_building_costs_little_memory_and_few_page_faults_and_imports_no_compiler() -> None:
    done = fresh_process.run(_BUILD_AND_MEASURE)
    assert done.returncode == 0, done.stderr
    peak, kept, compiler, faults = map(int, done.stdout.split())
    mask = 4 << 20
    assert kept < 4 * mask  # without precautions: 48 masks, and twice that in holes of the heap
    assert peak < 16 * mask  # 20 without returns of free memory
    assert not compiler
    assert faults * 4096 < 64 * mask  # 44 are drawn; without kept memory 124


def test_memory_of_a_mask_is_used_again_only_when_nothing_uses_it() -> None:
    layers = nn.ModuleList(nn.Module() for _ in range(9))
    attributes: list[torch.Tensor] = []

    def build(count: int, layer: nn.Module) -> None:
        mask = torch.ones(512, 512, dtype=torch.int32).triu(count) if count % 2 else torch.zeros(1024, 256)
        layer.register_buffer("mask", mask, persistent=count in {0, 1, 4, 5, 7})
        if count in {2, 3, 5}:
            attributes.append(mask[1:].fill_(count))
        elif count in {0, 1}:
            nn.init.ones_(layer.get_buffer("mask"))  # skipped; what is next in the memory does not lack it

    with empty_init():
        for count, layer in enumerate(layers):
            build(count, layer)
    assert [float(each.double().mean()) for each in attributes] == [2, 3, 5]
    assert [layer.get_buffer("mask").is_meta for layer in layers] == [count in {0, 1, 4, 5, 7} for count in range(9)]
    assert len({layer.get_buffer("mask").untyped_storage()._cdata for layer in layers}) == 9


@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_of_the_first_steps_leaves_nothing_wrapped(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = list(empty_init_module._WRAPPED)
    methods = [owner.__dict__[name] for owner, name, _ in wrapped]
    broken = [*wrapped[:at], (*wrapped[at][:2], mock.Mock(side_effect=KeyboardInterrupt)), *wrapped[at + 1 :]]
    with monkeypatch.context() as patch:
        patch.setattr(empty_init_module, "_WRAPPED", broken)
        with pytest.raises(KeyboardInterrupt), empty_init():
            pass
    assert not nn.Linear(2, 2).weight.is_meta
    with empty_init():
        assert nn.Linear(2, 2).weight.is_meta
    assert [owner.__dict__[name] for owner, name, _ in wrapped] == methods
