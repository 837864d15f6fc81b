"""Storages of converted torch files are shared as in the source, wherever a batch of reads ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from support import distributed
from support.oracles import same


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
