"""Files of big-endian machines: numbers are byteswapped during the load, as torch does it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import sluice
from sluice import UnsupportedError
from sluice._dtypes import number_bytes, torch_dtype
from sluice.engine.targets import Targets
from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.records import FileRecord
from sluice.sources.local import LocalFile
from support.dtypes import any_bits
from support.fake_accelerator import FakeAccelerator
from support.hostile_archives import Call, Global, storage, tensor_call, torch_archive
from support.oracles import bits, same
from support.plans import MIB, entry, entry_of, execute, facts, index_of, load, request, write_storages
from support.torch_files import saved_big_endian

#: Dtypes that torch writes as typed storages.
NAMES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    base = any_bits(name, 600)
    value = {
        "base": base,
        "rows": base[100:130],
        "strided": base[7::9],
        "transposed": base[:60].view(6, 10).t(),
        "expanded": base[5:6].expand(4, 3),
        "scalar": base[3],
        "empty": base[:0],
    }
    path = tmp_path / "f.pth"
    path.write_bytes(saved_big_endian(value))
    expected = torch.load(path, weights_only=True, mmap=False)
    assert (bits(expected["base"]) == bits(base)) == (number_bytes(name) == 1)
    ours = sluice.load_state_dict(path)
    assert same(dict(ours), expected)
    with sluice.open(path) as checkpoint:
        assert checkpoint.metadata["byteorder"] == "big"
        for key in value:
            assert bits(checkpoint[key].read()) == bits(expected[key])
        assert bits(checkpoint["rows"][3:17:2].read()) == bits(expected["rows"][3:17:2])


@pytest.mark.parametrize("page_cache", ["keep", "bypass"])
def test_large_tensors_that_take_many_reads(tmp_path: Path, page_cache: Any) -> None:
    value = {"a": torch.randn(3_000_001), "b": torch.randn(1_000_003, dtype=torch.float64), "c": torch.arange(7)}
    path = tmp_path / "f.pth"
    path.write_bytes(saved_big_endian(value))
    expected = torch.load(path, weights_only=True, mmap=False)
    ours = sluice.load_state_dict(path, page_cache=page_cache, memory=sluice.MemoryLimits(staging="8MiB"))
    assert all(torch.equal(ours[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in value)


def test_modules_get_the_numbers(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 200)
    path = tmp_path / "f.pth"
    path.write_bytes(saved_big_endian(model.state_dict()))
    expected = torch.load(path, weights_only=True, mmap=False)
    with sluice.empty_init():
        loaded, mapped = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    sluice.load_into(loaded, path, dtype=torch.bfloat16)
    assert bits(loaded.weight) == bits(expected["weight"].bfloat16())  # a cast follows the turn
    sluice.load_into(model, path)
    assert bits(model.weight) == bits(expected["weight"])
    assert bits(model.bias) == bits(expected["bias"])
    report = sluice.load_into(mapped, path, place="map")
    assert any("2 in a different byte order" in note for note in report.notes)
    assert bits(mapped.weight) == bits(expected["weight"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # warning of torch's own loader
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_composites(tmp_path: Path) -> None:
    value = {
        "q": torch.quantize_per_tensor(torch.randn(6), 0.1, 0, torch.qint32),
        "coo": torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), torch.randn(3), (1, 1)),
    }
    path = tmp_path / "f.pth"
    path.write_bytes(saved_big_endian(value))
    assert same(dict(sluice.load_state_dict(path)), torch.load(path, weights_only=True, mmap=False))


def test_tensors_whose_bytes_torch_does_not_swap() -> None:
    """torch byteswaps storages by their own dtype: untyped ones, for example of uint16, are not swapped."""
    for name in ("uint16", "uint32", "uint64"):
        content = saved_big_endian({"w": torch.arange(3).to(torch_dtype(name))})
        with (
            sluice.open(io.BytesIO(content)) as checkpoint,
            pytest.raises(UnsupportedError, match=f"in a big-endian file .* found torch.{name}") as caught,
        ):
            checkpoint["w"].read()
        assert caught.value.tensor == "w"
    bytes_of_floats = tensor_call(storage("0", 2), shape=(8,), function="_rebuild_tensor_v3", extra=())
    arguments = (*bytes_of_floats.arguments, Global("torch", "uint8"))
    value = {"w": Call(bytes_of_floats.function, arguments)}
    with pytest.raises(UnsupportedError, match="big-endian"):
        sluice.load_state_dict(io.BytesIO(torch_archive(value, {"0": bytes(8)}, records={"byteorder": b"big"})))
    assert sluice.load_state_dict(io.BytesIO(torch_archive(value, {"0": bytes(8)})))["w"].shape == (8,)


@pytest.mark.parametrize("cores", [2, 8], ids=["cast on the device", "cast on the host"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_accelerators(tmp_path: Path, cores: int, dtype: str) -> None:
    """Neighbors in one read, of several item sizes, copied to a device that copies late."""
    sent = [torch.randn(5_000), torch.randn(40, 50, dtype=torch.float64), torch.randn(300_000)]
    swapped = [torch.from_numpy(one.numpy().byteswap()) for one in sent]
    requests = [request(f"t{i}", entry_of(one, i), device="fake:0", dtype=dtype) for i, one in enumerate(sent)]
    sizes, fake = [one.itemsize for one in sent], FakeAccelerator(seed=1)
    loaded = load(tmp_path / "f", swapped, requests, swap_bytes=sizes, fake=fake, cores=cores)
    for one, found in zip(sent, loaded, strict=True):
        assert bits(found) == bits(one.to(torch_dtype(dtype)))


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
def test_numbers_and_their_bytes_in_one_plan(tmp_path: Path, device: str) -> None:
    """One plan reads the same bytes unswapped, swapped with two item sizes, and in part; all results are right."""
    raw = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
    places = write_storages(tmp_path / "f", [raw])
    source = LocalFile(tmp_path / "f")
    index = index_of(places * 3, (FileRecord(path=source.path, identity=source.identity),))
    storages = tuple(replace(one, swap_bytes=item) for one, item in zip(index.storages, (0, 4, 8), strict=True))
    entries = [
        entry((300_000,), dtype="uint8", start=1001),
        entry((50_000,), dtype="int32", storage=1, start=500),
        entry((3, 1000), dtype="int32", storage=1, start=2, stride=(5000, 2)),
        entry((20_000,), dtype="int64", storage=2, start=10_000),
        entry((400_000,), dtype="uint8"),
    ]
    requests = [request(str(number), one, device=device) for number, one in enumerate(entries)]
    targets, views = single_targets(requests, replace(index, storages=storages), {})
    four, eight = (torch.from_numpy(raw.numpy().view(f">i{item}").astype(f"<i{item}")) for item in (4, 8))
    turned = four.as_strided((3, 1000), (5000, 2), 2).contiguous()
    expected = [raw[1001:301_001], four[500:50_500], turned, eight[10_000:30_000], raw]
    try:
        plan = plan_load(targets, index.files, facts(cached=True), staging_bytes=MIB)
        finished = Targets(plan, accelerators={"fake:0": FakeAccelerator(seed=1)} if device != "cpu" else {})
        execute(plan, [source], finished)
    finally:
        source.close()
    assert [bits(one) for one in finished.tensors(views)] == [bits(one) for one in expected]
