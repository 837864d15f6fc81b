"""Conversions of packed tensors: in long runs, finished in memory, and written element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import rules
from sluice.converting.stream import TargetStream
from support.gguf_files import packed, write

WIDE, WIDE_VALUES = packed((96, 256), "Q4_0")
TALL, TALL_VALUES = packed((512, 64), seed=4)


@pytest.mark.parametrize("window_bytes", [None, 100], ids=["in memory", "scattered"])
def test_turned_cut_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int | None) -> None:
    write(tmp_path / "m.gguf", {"wide": WIDE, "tall": TALL})
    scattered: list[bool] = []

    def is_scattered(self: TargetStream, target: object) -> bool:
        if window_bytes is not None:
            self.window_bytes = window_bytes
        scattered.append(before(self, target))  # type: ignore[arg-type]
        return scattered[-1]

    before = TargetStream.is_scattered
    monkeypatch.setattr(TargetStream, "is_scattered", is_scattered)
    parts = rules.split("wide", ("left", "right"), dim=1, sizes=(100, 156))
    changes = [parts, rules.transpose("left"), rules.scale("right", 0.5), rules.transpose("tall")]
    sluice.convert(tmp_path / "m.gguf", tmp_path / "m.pth", rules=changes, manifest=tmp_path / "m.json")
    state = torch.load(tmp_path / "m.pth", weights_only=True)
    assert torch.equal(state["left"], WIDE_VALUES[:, :100].T)
    assert torch.equal(state["right"], WIDE_VALUES[:, 100:] * 0.5)
    assert torch.equal(state["tall"], TALL_VALUES.T)
    assert sluice.verify(tmp_path / "m.pth", manifest=tmp_path / "m.json").ok
    assert any(scattered) is (window_bytes is not None)
