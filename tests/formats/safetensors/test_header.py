"""Names of tied tensors in the metadata of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import sluice
from sluice import LimitError, Limits
from sluice.formats.safetensors.header import declare_ties

STATE = {"a": torch.arange(3.0), "b": torch.zeros(2)}


def write(path: Path, declared: object, **metadata: str) -> Path:
    text = declared if isinstance(declared, str) else json.dumps(declared)
    save_file(STATE, path, {**metadata, "sluice.tied_names": text})
    return path


def test_declared_names_share_the_entry_and_leave_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file(STATE, path, declare_ties({"x": "a", "y": "a", "format": "b"}, {"format": "pt", "x": "a", "note": "a"}))
    with sluice.open(path) as checkpoint:
        assert set(checkpoint) == {"a", "b", "x", "y", "format"}
        assert checkpoint["x"].entry is checkpoint["a"].entry is checkpoint["y"].entry
        assert checkpoint.metadata == {"format": "pt", "note": "a"}
    assert load_file(path).keys() == STATE.keys()


def test_names_of_save_model_are_used_only_by_a_model_that_has_them(tmp_path: Path) -> None:
    path = str(tmp_path / "f.safetensors")
    tied, apart = (nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)) for _ in range(2))
    tied[1].weight = tied[0].weight
    save_model(tied, path, {"task": "0.weight"})
    assert sluice.load_state_dict(path).keys() == load_file(path).keys() == {"0.weight"}
    sluice.load_into(apart, path)
    assert torch.equal(apart.get_parameter("1.weight"), load_file(path)["0.weight"])
    assert apart[1].weight is not apart[0].weight
    assert sluice.plan(apart, path).tensors == 2


@pytest.mark.parametrize(
    ("declared", "names", "note"),
    [
        ({}, [], None),
        ({"x": "gone"}, [], "'x'"),
        ({"x": "y", "y": "a"}, ["y"], "'x'"),
        ({"x": "x"}, [], "'x'"),
        ({"b": "a"}, [], None),  # stored itself
        ({"": "a"}, [""], None),
        ({"sluice.tied_names": "a"}, ["sluice.tied_names"], None),
        ("[]", [], "not a JSON object"),
        ('{"x":1}', [], "not a JSON object"),
        ('{"x":"a","x":"b"}', [], "not a JSON object"),
        ('{"x":{"y":"a"}}', [], "not a JSON object"),
    ],
)
def test_a_declaration_that_does_not_fit_the_tensors_creates_no_names(
    tmp_path: Path, declared: Any, names: list[str], note: str | None
) -> None:
    with sluice.open(write(tmp_path / "f.safetensors", declared)) as checkpoint:
        assert set(checkpoint) == {*STATE, *names}
        assert not checkpoint.metadata
        notes = " ".join(checkpoint.index.notes)
    assert note in notes if note else not notes


@pytest.mark.parametrize(
    ("limits", "declared"),
    [
        (Limits(entries=1000), {str(number): "a" for number in range(999)}),
        (Limits(entries=1000), {str(number): "gone" for number in range(1001)}),
        (Limits(name_bytes=10), {"x" * 11: "a"}),
    ],
)
def test_declared_names_count_against_the_limits(tmp_path: Path, limits: Limits, declared: dict[str, str]) -> None:
    path = write(tmp_path / "f.safetensors", declared)
    with pytest.raises(LimitError, match="entries|name_bytes"):  # noqa: RUF043 - alternatives
        sluice.open(path, limits=limits)
    sluice.open(path).close()


def test_declared_names_survive_a_converter_that_copies_the_metadata(tmp_path: Path) -> None:
    sluice.save({"a": STATE["a"], "x": STATE["a"]}, tmp_path / "f.safetensors", metadata={"by": "me"})
    with sluice.open(tmp_path / "f.safetensors") as checkpoint:
        state, metadata = sluice.load_state_dict(checkpoint), checkpoint.metadata
    sluice.save({"a": state["a"]}, tmp_path / "g.safetensors", metadata=metadata)
    with sluice.open(tmp_path / "g.safetensors") as checkpoint:
        assert list(checkpoint) == ["a"]
        assert checkpoint.metadata == {"format": "pt", "by": "me"}
