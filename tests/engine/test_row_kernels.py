"""Copies that compute on whole rows: bit-equal to the whole tensor for any partition into reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import sluice
from sluice._geometry import CopyPiece, cut_rows
from sluice._options import TransferOptions
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.row_kernels import RowFunction, cast, row_function, scaled
from sluice.engine.targets import Targets
from sluice.entries.assembly import join, multiply, pad
from sluice.entries.regions import select_region
from sluice.entries.slicing import slice_entry
from sluice.reading import transfer
from sluice.records import DeviceFacts, Elements, Entry, Request, RowKernel
from sluice.testing import FakeAccelerator
from support.oracles import bits
from support.plans import entry
from support.torch_files import saved_big_endian

ROWS, COLUMNS = 3000, 700


def scales(target: torch.Tensor, rows: torch.Tensor, _first: int, /) -> None:
    """Return the largest magnitude of each row, divided by 127."""
    target.copy_(rows.abs().amax(1, keepdim=True) / 127)


def int8(target: torch.Tensor, rows: torch.Tensor, _first: int, /) -> None:
    target.copy_((rows / (rows.abs().amax(1, keepdim=True) / 127)).round())


def numbered(target: torch.Tensor, rows: torch.Tensor, first: int, /) -> None:
    target.copy_(torch.arange(first, first + len(rows))[:, None] + 0 * rows[:, :1])


def halves(target: torch.Tensor, rows: torch.Tensor, _first: int, /) -> None:
    """Return two elements per stored byte, as decoding of blocks does."""
    target.view(len(rows), -1, 2).copy_(torch.stack([rows & 15, rows >> 4], 2))


KERNELS: dict[str, RowFunction] = {"scales": scales, "int8": int8, "numbered": numbered, "halves": halves}


def with_kernel(entry: Entry, name: str, row_elements: int) -> Entry:
    kernel = RowKernel(name=name, row_elements=row_elements)
    return replace(entry, elements=replace(entry.elements, kernel=kernel))


def read(path: Path, requests: list[tuple[str, int, str]], **options: object) -> list[torch.Tensor]:
    """Read tensor "w" of a file through kernels: name, elements of a finished row, dtype."""
    with OpenCheckpoint.open(path) as checkpoint:
        made = [
            Request(name=name, entry=with_kernel(checkpoint.entries["w"], name, size), dtype=dtype, device="cpu")
            for name, size, dtype in requests
        ]
        memory = sluice.MemoryLimits(staging=str(options.get("staging", "2MiB")))
        prepared = transfer.prepare(checkpoint, made, options=TransferOptions(memory=memory))
        return transfer.run(checkpoint, prepared, Targets(prepared.plan, kernels=KERNELS))[0]


@pytest.mark.parametrize("staging", ["1MiB", "2MiB", "64MiB"])
def test_rows_computed_in_pieces_equal_the_whole(tmp_path: Path, staging: str) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    torch.save({"w": weight}, tmp_path / "w.pt")
    wanted = [("int8", COLUMNS, "int8"), ("scales", 1, "float32"), ("numbered", 1, "float32")]
    quantized, scale, number = read(tmp_path / "w.pt", wanted, staging=staging)
    expected = weight.abs().amax(1, keepdim=True) / 127
    assert bits(scale) == bits(expected)
    assert bits(quantized) == bits((weight / expected).round().to(torch.int8))
    assert torch.equal(number, torch.arange(float(ROWS))[:, None])


def test_finished_rows_may_be_longer_than_stored_ones(tmp_path: Path) -> None:
    stored = torch.randint(0, 256, (500, 64), dtype=torch.uint8)
    torch.save({"w": stored}, tmp_path / "w.pt")
    (decoded,) = read(tmp_path / "w.pt", [("halves", 128, "float32")])
    assert torch.equal(decoded, torch.stack([stored & 15, stored >> 4], 2).view(500, 128).float())


def test_a_transposed_weight_in_a_big_endian_file(tmp_path: Path) -> None:
    weight = torch.randn(COLUMNS, 300)
    swapped = torch.from_numpy(weight.numpy().byteswap())
    (tmp_path / "w.pt").write_bytes(saved_big_endian({"w": swapped.T}))
    (scale,) = read(tmp_path / "w.pt", [("scales", 1, "float32")])
    assert bits(scale) == bits(weight.T.abs().amax(1, keepdim=True) / 127)


def test_chunks_of_whole_rows(tmp_path: Path) -> None:
    weight = torch.randn(ROWS, 64)
    torch.save({"w": weight}, tmp_path / "w.pt")
    with OpenCheckpoint.open(tmp_path / "w.pt") as checkpoint:
        whole = with_kernel(checkpoint.entries["w"], "numbered", 1)
        turned = join([slice_entry(whole, slice(1000, None)), slice_entry(whole, slice(0, 1000))], 0)
        request = Request(name="w", entry=turned, dtype="float32", device="cpu")
        prepared = transfer.prepare(checkpoint, [request])
        (number,) = transfer.run(checkpoint, prepared, Targets(prepared.plan, kernels=KERNELS))[0]
    assert torch.equal(number, torch.arange(float(ROWS))[:, None])


def test_a_kernel_on_the_way_to_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.reading.transfer.device_facts", lambda name: DeviceFacts(device=name))
    weight = torch.randn(ROWS, 64)
    torch.save({"w": weight}, tmp_path / "w.pt")
    device = FakeAccelerator()
    with OpenCheckpoint.open(tmp_path / "w.pt") as checkpoint:
        entry = with_kernel(checkpoint.entries["w"], "scales", 1)
        prepared = transfer.prepare(checkpoint, [Request(name="w", entry=entry, dtype="float32", device="fake:0")])
        targets = Targets(prepared.plan, accelerators={"fake:0": device}, kernels=KERNELS)
        (scale,) = transfer.run(checkpoint, prepared, targets)[0]
    assert bits(scale) == bits(weight.abs().amax(1, keepdim=True) / 127)


def test_parts_of_rows_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(10, 8)}, tmp_path / "w.pt")
    with OpenCheckpoint.open(tmp_path / "w.pt") as checkpoint:
        whole = with_kernel(checkpoint.entries["w"], "scales", 1)
        turned = join([slice_entry(whole, (..., slice(4, None))), slice_entry(whole, (..., slice(0, 4)))], 1)
        with pytest.raises(ValueError, match="whole rows"):
            transfer.prepare(checkpoint, [Request(name="w", entry=turned, dtype="float32", device="cpu")])


def test_a_region_has_whole_rows() -> None:
    whole = with_kernel(entry((10, 8), storage=0), "scales", 1)
    assert select_region(whole, (((2, 5),), ((0, 8),))).shape == (3, 8)
    with pytest.raises(ValueError, match="a region of whole rows"):
        select_region(whole, (((0, 5),), ((0, 4),)))


def test_a_row_larger_than_a_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold a row of 400 bytes"):
        list(cut_rows(CopyPiece(0, 800, (2, 100), (100, 1), (100, 0), 0), 4, limit_bytes=396))


def test_the_first_users_of_the_seam() -> None:
    rows = torch.randn(4, 5)
    assert row_function(Elements(dtype="float32"), {}) is cast
    target = torch.empty(4, 5, dtype=torch.bfloat16)
    cast(target, rows, 0)
    assert bits(target) == bits(rows.bfloat16())
    row_function(Elements(dtype="float32", factors=(0.5, 3.0)), {})(target, rows, 0)
    assert bits(target) == bits((rows * 0.5 * 3.0).bfloat16())
    scaled(())(target, rows, 0)
    assert bits(target) == bits(rows.bfloat16())


def test_factors_come_before_a_kernel(tmp_path: Path) -> None:
    weight = torch.randn(50, 8)
    torch.save({"w": weight}, tmp_path / "w.pt")
    with OpenCheckpoint.open(tmp_path / "w.pt") as checkpoint:
        entry = with_kernel(multiply(checkpoint.entries["w"], 0.5), "scales", 1)
        prepared = transfer.prepare(checkpoint, [Request(name="w", entry=entry, dtype="float32", device="cpu")])
        (scale,) = transfer.run(checkpoint, prepared, Targets(prepared.plan, kernels=KERNELS))[0]
    assert bits(scale) == bits((weight * 0.5).abs().amax(1, keepdim=True) / 127)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"existing": True}, "new, row-major"),
        ({"stride": (1, 10)}, "new, row-major"),
        ({"entry": entry((), storage=0)}, "rows with elements"),
        ({"entry": entry((3, 0), storage=0)}, "rows with elements"),
        ({"entry": pad(entry((3, 4), storage=0), 0, 5, 0.0)}, "no constants"),
    ],
    ids=["live memory", "columns first", "a scalar", "empty rows", "a constant"],
)
def test_requests_that_a_kernel_cannot_fill(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    torch.save({"w": torch.randn(10, 8)}, tmp_path / "w.pt")
    with OpenCheckpoint.open(tmp_path / "w.pt") as checkpoint:
        chosen = change.pop("entry", None) or checkpoint.entries["w"]
        if chosen.parts:
            first, *rest = chosen.parts
            chosen = replace(chosen, parts=(replace(first, entry=with_kernel(first.entry, "scales", 1)), *rest))
        else:
            chosen = with_kernel(chosen, "scales", 1)
        with pytest.raises(ValueError, match=problem):
            transfer.prepare(checkpoint, [Request(name="w", entry=chosen, dtype="float32", device="cpu", **change)])
