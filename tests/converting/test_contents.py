"""The content of a conversion, and bytes that would be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import sluice
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import flat_contents, refuse_repeats, whole_contents


def opened(path: Path, value: object, limits: sluice.Limits | None = None) -> OpenCheckpoint:
    torch.save(value, path)
    return OpenCheckpoint.open(path, limits=limits)


def test_repeated_bytes_are_bounded(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "m.pt", {"w": torch.ones(4).expand(1000, 4)}, sluice.Limits(repeated_bytes=15_000))
    with pytest.raises(sluice.LimitError, match=r"at most 15000 bytes more \(repeated_bytes\); found 15984 bytes"):
        refuse_repeats(checkpoint.entries, checkpoint)
    refuse_repeats({"w": replace(checkpoint.entries["w"], shape=(900, 4))}, checkpoint)
    checkpoint.close()


def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(2)}, "optimizer": {"step": torch.ones(1)}, "epoch": 3}
    checkpoint = opened(tmp_path / "m.pt", value)
    contents = flat_contents(checkpoint, key="model", rename={"w": "weight"}, rules=())
    assert isinstance(contents.tree, dict)
    assert list(contents.tree) == ["weight"]
    assert contents.notes == ("only 'model' was taken: 1 tensors and 1 other values outside it were left out",)
    assert whole_contents(checkpoint, key=None, rename=None, rules=()).notes == ()
    checkpoint.close()


def test_a_tensor_and_another_value_need_different_names(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "m.pt", {"a": torch.ones(1), "b": 3})
    with pytest.raises(sluice.MismatchError, match="rename maps a tensor and another value to the same name"):
        whole_contents(checkpoint, key="", rename=lambda _: "same", rules=())
    checkpoint.close()
