"""Conversions: their content, and entries that are read in batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import MemoryLimits, rules
from sluice import _defaults as defaults
from support import distributed
from support.gguf_files import packed, write
from support.oracles import same

WIDE, WIDE_VALUES = packed((96, 256), "Q4_0")
TALL, TALL_VALUES = packed((512, 64), seed=4)


def test_the_tensors_that_are_taken_are_counted(tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(4, 2), "b": torch.ones(2)}, "ema": {"w": torch.zeros(1)}, "epoch": 3}
    path = tmp_path / "run.pt"
    torch.save(value, path)
    for how, taken in (
        ({}, 2),
        ({"rename": {"b": None}}, 1),
        ({"rules": [rules.drop("b")]}, 1),
        ({"rules": [rules.split("w", ["one", "two"], sizes=[1, 3])]}, 2),
        ({"rules": [rules.split("w", ["one", "two"], sizes=[1, 3]), rules.drop("b")]}, 1),
    ):
        report = sluice.convert(path, tmp_path / "x.safetensors", key="model", overwrite=True, **how)
        assert (report.taken, report.total, report.key) == (taken, 3, "model"), how
        start = f"wrote {taken} of 3 tensors of {path} (torch-zip, key 'model') to {tmp_path / 'x.safetensors'} "
        assert str(report).startswith(start)
    planned = sluice.convert(path, tmp_path / "y.pt", dry_run=True)
    assert str(planned).startswith(f"would write 3 of 3 tensors of {path} (torch-zip) to ")


def test_nothing_to_convert_and_names_that_meet_are_errors(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": 3}, tmp_path / "m.pt")
    with pytest.raises(sluice.MismatchError, match="rename maps a tensor and another value to the same name"):
        sluice.convert(tmp_path / "m.pt", tmp_path / "n.pt", key="", rename=lambda _: "same")
    torch.save({"model": {"w": torch.ones(2)}, "args": {"lr": 1}}, tmp_path / "run.pt")
    for how in ({"rename": {"w": None}}, {"rules": [rules.drop("w")]}, {"key": "args"}):
        with pytest.raises(sluice.MismatchError, match="none of its 1 tensors would be converted"):
            sluice.convert(tmp_path / "run.pt", tmp_path / "x.safetensors", **how)
        assert not (tmp_path / "x.safetensors").exists()
    sluice.convert(tmp_path / "run.pt", tmp_path / "args.pt", key="args")  # a torch file holds other values
    assert torch.load(tmp_path / "args.pt", weights_only=True) == {"lr": 1}


def test_packed_tensors_turned_cut_and_scaled(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"wide": WIDE, "tall": TALL})
    parts = rules.split("wide", ("left", "right"), dim=1, sizes=(96, 160))
    changes = [parts, rules.transpose("left"), rules.scale("right", 0.5), rules.transpose("tall")]
    sluice.convert(tmp_path / "m.gguf", tmp_path / "m.pth", rules=changes, manifest=tmp_path / "m.json")
    state = torch.load(tmp_path / "m.pth", weights_only=True)
    assert torch.equal(state["left"], WIDE_VALUES[:, :96].T)
    assert torch.equal(state["right"], WIDE_VALUES[:, 96:] * 0.5)
    assert torch.equal(state["tall"], TALL_VALUES.T)
    assert sluice.verify(tmp_path / "m.pth", manifest=tmp_path / "m.json").ok


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
@pytest.mark.parametrize("to", [None, torch.float64])
def test_tensors_larger_than_a_batch_are_read_in_pieces(tmp_path: Path, name: str, to: torch.dtype | None) -> None:
    state = {"turned": torch.randn(900, 700).t(), "row": torch.randn(600_000), "cut": torch.randn(3, 5, 70_000)[:, 1:4]}
    torch.save(state, tmp_path / "in.pt")
    small = MemoryLimits(staging="2MiB")
    sluice.convert(tmp_path / "in.pt", tmp_path / name, dtype=to, memory=small, manifest=tmp_path / "m.json")
    found = sluice.load_state_dict(tmp_path / name)
    assert all(torch.equal(found[key], each.to(to)) for key, each in state.items())
    assert sluice.verify(tmp_path / name, manifest=tmp_path / "m.json").ok


def test_turned_packed_tensors_larger_than_a_batch_are_cut_at_packs(tmp_path: Path) -> None:
    (left, left_values), (right, right_values) = packed((512, 1024)), packed((512, 1024), "Q4_0")
    write(tmp_path / "m.gguf", {"left": left, "right": right})
    changes = [rules.concatenate(("left", "right"), "both", dim=1), rules.transpose("both")]
    small = MemoryLimits(staging="2MiB")
    sluice.convert(tmp_path / "m.gguf", tmp_path / "m.safetensors", rules=changes, memory=small)
    found = sluice.load_state_dict(tmp_path / "m.safetensors")
    assert torch.equal(found["both"], torch.cat([left_values, right_values], 1).T)


def views() -> dict[str, torch.Tensor]:
    base, far = torch.arange(60.0), torch.arange(400.0)
    return {
        "tied": base[:20],
        "alone": torch.arange(7),
        "again": base[:20],
        "overlaps": base[10:30],
        "touches": base[30:40].view(2, 5),
        **{f"far {i}": far[50 * i : 50 * i + 3] for i in range(6)},
        "whole": base,
        "turned": torch.arange(12.0).view(3, 4).t(),
        "empty": torch.empty(0, 2),
        "far, again": far[100:103],
    }


@pytest.mark.parametrize("to", [None, torch.float64])
@pytest.mark.parametrize("fills", [1, 2, 3, 5])
def test_views_of_one_storage_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fills: int, to: torch.dtype | None
) -> None:
    torch.save(views(), tmp_path / "in.pt")
    sluice.convert(tmp_path / "in.pt", tmp_path / "one batch.pt", dtype=to)
    monkeypatch.setattr(defaults, "SCAN_BATCH_PIECES", fills)
    sluice.convert(tmp_path / "in.pt", tmp_path / "many.pt", dtype=to, manifest=tmp_path / "many.json")
    assert (tmp_path / "many.pt").read_bytes() == (tmp_path / "one batch.pt").read_bytes()
    found = torch.load(tmp_path / "many.pt", weights_only=True)
    expected = {
        name: tensor.to(to) if to and tensor.is_floating_point() else tensor for name, tensor in views().items()
    }
    assert same(found, expected)
    shared = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert len({shared[name] for name in ("tied", "again", "overlaps", "touches", "whole")}) == 1
    assert shared["far 2"] == shared["far, again"] != shared["far 3"]
    assert sluice.verify(tmp_path / "many.pt", manifest=tmp_path / "many.json").ok


def test_tensors_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SCAN_BATCH_PIECES", 3)
    state = {f"w{i}": torch.randn(8, 3) for i in range(5)}
    source = distributed.write(tmp_path / "in", {name: distributed.rows(tensor, 4) for name, tensor in state.items()})
    sluice.convert(source, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state)
