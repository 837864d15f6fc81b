"""``place="map"``: tensors that map pages of the file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice.planning.mappings import Mapped, plan_mapping
from sluice.planning.memory_layout import single_targets
from sluice.records import Request
from support.leaks import open_files
from support.plans import MIB, entry, index_of, request
from support.system_calls import failing
from support.trained_net import assert_equal, empty

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def network() -> nn.Sequential:
    """A model with a tensor above 1 MiB, small tensors, a counter, and a tie."""
    first, last = nn.Linear(600, 600), nn.Linear(600, 600)
    last.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(600), nn.Linear(600, 10), last)


def saved(path: Path) -> nn.Sequential:
    torch.manual_seed(0)
    model = network()
    model[1](torch.randn(8, 600))  # moves the running statistics
    if path.suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        safetensors.torch.save_model(model, str(path))
    return model


def mapped(path: Path, model: nn.Module | None = None, **options: object) -> tuple[nn.Module, sluice.LoadReport]:
    if model is None:
        model = empty(network)
    return model, sluice.load_into(model, path, place="map", **options)  # type: ignore[arg-type]


@pytest.fixture(params=["f.pth", "f.safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def maps_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def test_a_mapped_model_is_the_saved_one_and_nothing_was_read(file: Path) -> None:
    expected = saved(file)
    model, report = mapped(file)
    assert_equal(model, expected)
    assert model.get_parameter("3.weight") is model.get_parameter("0.weight")
    assert report.read_bytes == 0
    assert report.reads == {"direct": 0, "buffered": 0}
    assert report.mapped_bytes == report.final_bytes > 2 * MIB // 2
    assert report.predicted.file_bytes == 0
    assert report.predicted.total_bytes < 17 * MIB
    assert any("are pages of the file" in note for note in report.notes)
    assert "mapped" in str(report)
    assert maps_of(file)
    assert open_files()[str(file)] == 0
    del model
    assert not maps_of(file)


def test_writing_changes_the_model_and_not_the_file(file: Path) -> None:
    expected = saved(file)
    before = file.read_bytes()
    model, _ = mapped(file)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    other, _ = mapped(file)
    assert_equal(other, expected)
    assert file.read_bytes() == before


def test_casts_and_deleted_modules_release_their_pages(file: Path) -> None:
    expected, (model, _) = saved(file), mapped(file)
    before = len(maps_of(file))
    assert isinstance(model, nn.Sequential)
    del model[3], model[0]
    assert 0 < len(maps_of(file)) < before
    model.half()
    assert torch.equal(model.get_parameter("1.weight"), expected.get_parameter("2.weight").half())
    for name, buffer in model.named_buffers():
        assert buffer.dtype != torch.float32, name
    model.share_memory()  # moves what is left of the file to shared memory
    assert not maps_of(file)


@pytest.mark.parametrize(
    ("options", "live", "why"),
    [({"dtype": torch.bfloat16}, False, "cast"), ({}, True, "filled in place")],
    ids=["cast", "live"],
)
def test_a_tensor_that_cannot_be_mapped_is_copied_and_the_report_has_the_reason(
    file: Path, options: dict[str, object], live: bool, why: str
) -> None:
    expected = saved(file)
    model, report = mapped(file, network() if live else None, **options)
    if live:
        assert_equal(model, expected)
    else:
        assert torch.equal(model.get_parameter("2.weight"), expected.get_parameter("2.weight").bfloat16())
    assert report.mapped_bytes == (0 if live else 8)  # the counter is an integer
    assert any("are copied: " in note and f" {why}" in note for note in report.notes)


def test_two_parameters_that_share_bytes_in_the_file_stay_apart(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    torch.save({"0": base[:60], "1": base[40:]}, tmp_path / "f.pth")
    model = nn.ParameterList([torch.empty(60, device="meta") for _ in range(2)])
    _, report = mapped(tmp_path / "f.pth", model)
    assert report.mapped_bytes == 120 * 4
    with torch.no_grad():
        model[0].zero_()
    assert torch.equal(model[1], base[40:])


def test_the_pages_are_those_of_the_page_cache_until_they_are_written_to(tmp_path: Path) -> None:
    tensor = torch.randn(4 * MIB)
    safetensors.torch.save_file({"0": tensor}, tmp_path / "f.safetensors")
    model = nn.ParameterList([torch.empty(4 * MIB, device="meta")])
    mapped(tmp_path / "f.safetensors", model)
    model[0].sum()
    touch = """if True:
        import mmap, sys
        with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            sum(pages[::4096])
            print("ready", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", touch, str(tmp_path / "f.safetensors")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        sizes = smaps(tmp_path / "f.safetensors")
        other.communicate("")
    assert sizes["Rss"] >= tensor.nbytes
    assert sizes["Shared_Clean"] + sizes["Shared_Dirty"] >= 0.99 * tensor.nbytes  # dirty: not yet on the disk
    assert sizes["Pss"] <= 0.51 * sizes["Rss"]  # half, because two processes share the pages
    assert sizes["Anonymous"] == 0
    with torch.no_grad():
        model[0][: MIB // 2].zero_()
    assert smaps(tmp_path / "f.safetensors")["Anonymous"] in {2 * MIB, 2 * MIB + 4096}


def smaps(path: Path) -> dict[str, int]:
    """Return the sums of the fields of smaps over the mappings of a file, in bytes."""
    sums: dict[str, int] = {}
    counts = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            counts = line.endswith(str(path))
        elif counts and rest.endswith("kB"):
            sums[name] = sums.get(name, 0) + int(rest.split()[0]) * 1024
    return sums


def test_a_file_larger_than_memory_is_ready_at_once(tmp_path: Path) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("vm.overcommit_memory=2 counts private mappings")
    count = (60 << 30) // 4
    header = json.dumps({"0": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 4 * count)
    model = nn.ParameterList([torch.empty(count, device="meta")])
    _, report = mapped(path, model)
    assert report.mapped_bytes == 60 << 30
    assert float(model[0].detach()[count // 2]) == 0.0
    with torch.no_grad():
        model[0][count - 1] = 7.0
    assert smaps(path)["Anonymous"] == 4096
    with pytest.raises(sluice.BudgetError, match=r"What would fit: place='map' \(needs 16\.0 MiB of host memory\)"):
        sluice.load_into(nn.ParameterList([torch.empty(count, device="meta")]), path)


def test_a_file_that_was_replaced_is_not_mapped(file: Path) -> None:
    saved(file)
    model = empty(network)
    with sluice.open(file) as checkpoint:
        new = file.with_suffix(".new")
        new.write_bytes(file.read_bytes())
        new.replace(file)
        with pytest.raises(sluice.SourceChangedError):
            sluice.load_into(model, checkpoint, place="map")
    assert model.get_parameter("0.weight").is_meta
    assert not maps_of(file)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOMEM])
def test_a_system_that_refuses(file: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    expected = saved(file)
    monkeypatch.setattr("sluice.sources.local.map_privately", failing(number))
    if number == errno.ENOMEM:
        with pytest.raises(sluice.BudgetError, match="overcommit"):
            mapped(file)
        return
    model, report = mapped(file)
    assert_equal(model, expected)
    assert report.mapped_bytes == 0
    assert any("in a file that the system cannot map" in note for note in report.notes)


def mapping_of(requests: list[Request], storages: list[tuple[int, int]]) -> Mapped:
    return plan_mapping(single_targets(requests, index_of(storages), {})[0], [True])


@pytest.mark.parametrize(
    ("requested", "offset", "why"),
    [
        (request("t", entry((4, 4)), device="cuda:0"), 64, "on an accelerator"),
        (request("t", entry((4, 4), stride=(1, 4)), stride=(4, 1)), 64, "in another order in the file"),
        (request("t", entry((4, 2), stride=(4, 1))), 64, "in another order in the file"),
        (request("t", entry((4, 4))), 65, "at an offset that is not a multiple of the item size"),
    ],
)
def test_why_a_tensor_is_copied(requested: Request, offset: int, why: str) -> None:
    made = mapping_of([requested], [(offset, 64)])
    assert not made.blocks
    assert made.reasons[1].endswith(f"are copied: 1 {why}")


def test_a_permuted_tensor_is_mapped_if_the_module_permutes_it_too() -> None:
    made = mapping_of([request("t", entry((4, 4), stride=(1, 4)), stride=(1, 4))], [(64, 64)])
    assert made.ranges[0].offset == 64
    assert made.ranges[0].nbytes == 64


def test_empty_tensors_are_neither_mapped_nor_copied() -> None:
    made = mapping_of([request("t", entry((0, 4)))], [(64, 0)])
    assert not made.blocks
    assert len(made.reasons) == 1


def requests_at(places: list[tuple[int, int]]) -> list[Request]:
    return [request(f"t{i}", entry((nbytes,), dtype="uint8", storage=i)) for i, (_, nbytes) in enumerate(places)]


@given(
    places=st.lists(st.tuples(st.integers(0, 8 * MIB), st.integers(1, 2 * MIB)), max_size=20),
    most=st.sampled_from([3, 10_000]),
)
def test_ranges_hold_their_targets_without_overlap(places: list[tuple[int, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice._defaults.MAPPED_RANGES", most)
        made = mapping_of(requests_at(places), places)
    inside: dict[int, list[tuple[int, int]]] = {}
    for position, (at, nbytes) in enumerate(places):
        block = made.blocks[position]
        held = made.ranges[block.memory]
        assert held.offset + block.offset == at
        assert block.offset + nbytes <= held.nbytes
        inside.setdefault(block.memory, []).append((at, at + nbytes))
    for number, members in inside.items():
        members.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(members))
        assert len(members) == 1 or most == 3 or made.ranges[number].nbytes <= MIB


def test_many_tensors_are_joined_to_few_mappings() -> None:
    places = [(i * 2 * MIB, 2 * MIB) for i in range(25_000)]
    assert len(mapping_of(requests_at(places), places).ranges) <= 10_000
