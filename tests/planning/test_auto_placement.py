"""``device="auto"`` and device mappings, on simulated accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice._errors import BudgetError
from sluice.entries.patterns import device_of
from sluice.loading import devices as _devices
from sluice.planning.auto_placement import Member, auto_placement
from sluice.planning.cuda_allocator import plan_reservation
from sluice.records import DeviceFacts
from support.fake_accelerator import FakeAccelerator
from support.trained_net import empty

MIB = 1 << 20


def members(sizes: Mapping[str, int]) -> list[Member]:
    return [Member(names=tuple(names.split(" = ")), nbytes=mib * MIB) for names, mib in sizes.items()]


def rooms(*sizes: int) -> dict[str, int]:
    return {f"cuda:{i}": mib * MIB for i, mib in enumerate(sizes)}


TRANSFORMER = {
    "embed.weight": 20,
    **{f"blocks.{i}.{name}.weight": 20 for i in range(4) for name in ("attention", "mlp")},
    "norm.weight": 20,
    "head.weight": 20,
}
BLOCKS = {f"blocks.{i}" for i in range(4)}


def test_without_an_accelerator_everything_goes_to_the_cpu(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.loading.devices.accelerators", tuple)
    report = sluice.load_into(empty(Model), file, device="auto")
    assert (report.placement, report.devices) == ({"": "cpu"}, ("cpu",))
    assert auto_placement([], rooms(10)) == {}


def test_divisible_modules_are_split_down_to_modules_without_children() -> None:
    placed = auto_placement(members(TRANSFORMER), rooms(50))
    assert placed["blocks.0.attention"] == "cuda:0"
    assert placed["blocks.0.mlp"] == "cpu"
    both = members({"layer.weight": 20, "layer.bias": 20, "head.weight": 20})
    assert auto_placement(both, rooms(30)) == {"": "cpu"}  # layer stays whole, and modules keep their order


def test_a_tensor_of_a_module_with_children_is_placed_by_its_own_name() -> None:
    mixed = members({"attention.in_proj": 20, "attention.out.weight": 20})
    assert auto_placement(mixed, rooms(30)) == {"attention.in_proj": "cuda:0", "attention.out": "cpu"}


def test_modules_that_share_a_tensor_stay_together() -> None:
    tied = {**TRANSFORMER}
    del tied["embed.weight"], tied["head.weight"]
    tied = {"embed.weight = head.weight": 20, **tied, "head.bias": 20}
    placed = auto_placement(members(tied), rooms(90), whole=BLOCKS)
    assert placed["embed"] == placed["head"] == "cuda:0"  # with the bias, because the module is not split
    assert placed["blocks.0"] == "cuda:0"
    assert placed["blocks.1"] == "cpu"
    # Together they do not fit, so neither is placed there.
    assert auto_placement(members(tied), rooms(30), whole=BLOCKS) == {"": "cpu"}


def test_a_tie_into_a_module_that_stays_whole_takes_all_of_it() -> None:
    tied = members({"embed.weight = last.inner.weight": 20, "middle.weight": 20, "last.other.weight": 20})
    assert auto_placement(tied, rooms(50), whole={"last"}) == {"embed": "cuda:0", "middle": "cpu", "last": "cuda:0"}
    assert auto_placement(tied, rooms(50))["last.other"] == "cpu"


def test_a_tensor_already_on_an_accelerator_costs_nothing_there() -> None:
    live = [Member(names=(f"{i}.weight",), nbytes=20 * MIB, at="cuda:0") for i in range(5)]
    assert auto_placement(live, rooms(0)) == {"": "cuda:0"}
    assert auto_placement(live, {"cuda:1": 50 * MIB})["2"] == "cpu"


def test_the_rounding_of_the_allocator_counts() -> None:
    odd = members({f"{i}.weight": 3 for i in range(10)})
    assert auto_placement(odd, rooms(30)) == {"": "cuda:0"}
    apart = auto_placement(odd, rooms(30), one_block=False)  # six to a segment of 20 MiB
    assert [apart[str(i)] for i in range(10)] == ["cuda:0"] * 6 + ["cpu"] * 4


@st.composite
def modules(draw: st.DrawFn) -> list[Member]:
    """Draw tensors in random trees of modules, some of them tied."""
    paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)
    names = draw(st.lists(paths.map(lambda path: f"{path}.w"), unique=True, min_size=1, max_size=12))
    names.sort()
    made: list[Member] = []
    while names:
        own = tuple(names.pop(0) for _ in range(min(len(names), draw(st.sampled_from([1, 1, 1, 2, 3])))))
        made.append(Member(names=own, nbytes=draw(st.integers(0, 40 * MIB))))
    return made


@given(
    made=modules(),
    sizes=st.lists(st.integers(0, 80), max_size=3),
    whole=st.sets(st.sampled_from(["a", "a.b", "b", "c.c", "b.a"])),
    one_block=st.booleans(),
)
def test_every_tensor_is_placed_and_no_accelerator_exceeds_its_memory(
    made: list[Member], sizes: list[int], whole: set[str], one_block: bool
) -> None:
    available = rooms(*sizes)
    placed = auto_placement(made, available, whole=whole, one_block=one_block)
    devices = [device_of(member.names[0], placed) for member in made]
    order = [*available, "cpu"]
    assert set(devices) <= set(order)
    for room, nbytes in available.items():
        inside = [member.nbytes for member, device in zip(made, devices, strict=True) if device == room]
        assert plan_reservation(inside, one_block=one_block).reserved_bytes <= nbytes
    for member, device in zip(made, devices, strict=True):
        assert all(device_of(name, placed) == device for name in member.names)
    for path in whole:
        within = {device_of(n, placed) for m in made for n in m.names if n.startswith(f"{path}.")}
        assert len(within) <= 1
    if all(len(member.names) == 1 for member in made):
        assert [order.index(str(device)) for device in devices] == sorted(order.index(str(d)) for d in devices)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)


class Model(nn.Module):
    """A model of 1 MiB per matrix: an embedding with a tied head, and four blocks of two matrices."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(Model().state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeAccelerator]:
    """Fake two accelerators of 40 MiB, and every query of torch about them."""
    made = {f"fake:{i}": FakeAccelerator(seed=i) for i in range(2)}

    def known(device: str) -> DeviceFacts:
        return DeviceFacts(device=device, free_bytes=40 * MIB)

    monkeypatch.setattr("sluice._arguments._accelerator", str)
    monkeypatch.setattr("sluice.loading.devices.accelerators", lambda: tuple(made))
    monkeypatch.setattr("sluice.loading.devices.device_facts", known)
    monkeypatch.setattr("sluice.reading.transfer.device_facts", known)
    monkeypatch.setattr("sluice.engine.targets.accelerator", made.__getitem__)
    return made


def test_a_load_fills_the_accelerators_and_reports_the_choice(file: Path, fakes: dict[str, FakeAccelerator]) -> None:
    model = empty(Model)
    # The scratch takes 10 MiB; tensors of up to 1 MiB share segments of 2 MiB.
    report = sluice.load_into(model, file, device="auto", memory=sluice.MemoryLimits(device="14MiB"))
    assert report.placement == {
        "embed": "fake:0",
        "blocks.0": "fake:0",
        "blocks.1": "fake:1",
        "blocks.2": "fake:1",
        "blocks.3": "cpu",
        "head": "fake:0",
    }
    assert report.devices == ("cpu", "fake:0", "fake:1")
    assert "on fake:1 (2): blocks.1, blocks.2" in str(report)
    assert [fake.allocated_bytes for fake in fakes.values()] == [3 * MIB, 4 * MIB]
    for fake in fakes.values():
        fake.assert_filled_once()
    for name, tensor in torch.load(file).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.head.weight is model.embed.weight


def test_free_memory_is_filled_except_for_a_reserve(file: Path, fakes: dict[str, FakeAccelerator]) -> None:
    assert sluice.load_into(empty(Model), file, device="auto").placement == {"": "fake:0"}
    half: dict[str, int | str] = {"fake:0": 0, "fake:1": "18MiB"}
    report = sluice.load_into(
        empty(Model), file, device="auto", dtype=torch.bfloat16, memory=sluice.MemoryLimits(device=half)
    )
    assert report.placement == {"": "fake:1"}  # it fits with half the bytes


def test_accelerators_with_unknown_free_memory_need_a_limit(
    file: Path, fakes: dict[str, FakeAccelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.loading.devices.device_facts", lambda device: DeviceFacts(device=device))
    with pytest.raises(BudgetError, match=r"free memory of fake:0 is unknown; set it with MemoryLimits\(device=...\)"):
        sluice.load_into(empty(Model), file, device="auto")
    assert sluice.load_into(empty(Model), file, device="auto", memory=sluice.MemoryLimits(device="30MiB")).devices


def test_nothing_fits_anywhere(file: Path, fakes: dict[str, FakeAccelerator]) -> None:
    model = empty(Model)
    with pytest.raises(BudgetError, match="host memory"):
        sluice.load_into(model, file, device="auto", memory=sluice.MemoryLimits(host="8MiB", device=0, staging="1MiB"))
    assert model.embed.weight.is_meta


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        *(
            (each, f"{each}.*'auto' fills accelerators in order")
            for each in ("balanced", "balanced_low_0", "sequential")
        ),
        *((each, "disk.*place='map'") for each in ("disk", {"": "cpu", "head": "disk"})),
    ],
)
def test_what_accelerate_takes_besides_is_refused_by_name(file: Path, device: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sluice.load_into(empty(Model), file, device=device)


def test_device_maps_of_accelerate_are_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _devices.parse_placement({"": "cpu"}) == {"": "cpu"}
    asked = mock.Mock(return_value=SimpleNamespace(device=torch.device("cuda", 1)))
    monkeypatch.setattr("torch.empty", asked)
    assert _devices.parse_placement({"blocks.0": 1}) == {"blocks.0": "cuda:1"}
    assert asked.call_args.kwargs["device"] == 1  # torch maps an int to an accelerator


def test_prefixes_that_name_nothing_are_refused(file: Path) -> None:
    model = empty(Model)
    with pytest.raises(ValueError, match="no module or tensor of the model: 'block', 'haed'"):
        sluice.load_into(model, file, device={"": "cpu", "block": "cpu", "blocks": "cpu", "haed": "cpu"})
    assert model.embed.weight.is_meta
    sluice.load_into(
        model, file, device={"embed": "cpu", "blocks.1.up.weight": "cpu", "blocks.0": "cpu", "head": "cpu"}
    )
