"""The content of a conversion, and bytes that would be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import sluice
from sluice import rules
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


def test_nothing_to_convert_is_an_error(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": {"lr": 1}}, tmp_path / "run.pt")
    for how in ({"rename": {"w": None}}, {"rules": [rules.drop("w")]}, {"key": "args"}):
        with pytest.raises(sluice.MismatchError, match="none of its 1 tensors would be converted"):
            sluice.convert(tmp_path / "run.pt", tmp_path / "x.safetensors", **how)
        assert not (tmp_path / "x.safetensors").exists()
    sluice.convert(tmp_path / "run.pt", tmp_path / "args.pt", key="args")  # a torch file holds other values
    assert torch.load(tmp_path / "args.pt", weights_only=True) == {"lr": 1}
