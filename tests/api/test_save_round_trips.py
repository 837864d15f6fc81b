"""Round trips through ``save`` and ``convert``: names, values and ties come back in every form."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import sluice

#: File name and arguments of each form.
FORMS: dict[str, dict[str, Any]] = {
    "f.pth": {},
    "f.safetensors": {},
    "model": {},
    "shards": {"max_shard_size": 64},
}

BASE = torch.arange(24, dtype=torch.float32)
COMPLEX = torch.randn(6, dtype=torch.complex64)

#: Tensors that share memory in every way; those at the same position have the same elements.
TENSORS = [
    BASE,
    BASE[3:9],
    BASE.view(4, 6),
    BASE.view(4, 6).t(),
    BASE[::2],
    torch.empty(0, 3),
    torch.tensor(7),
    nn.Parameter(BASE[3:9]),
    torch.ones(5, dtype=torch.bfloat16),
    COMPLEX,
    COMPLEX.conj(),
    nn.Parameter(BASE[3:9], requires_grad=False),
]

ODD_NAMES = ["format", "sluice.tied_names", "a", "a.b", "ä", '"', "\\", "\n", " ", "0", "x" * 200, "model", "{}", "-"]
NAMES = st.sampled_from(ODD_NAMES) | st.text(min_size=1, max_size=8).filter(
    lambda name: os.path.basename(name) == name and name not in {".", ".."} and "\0" not in name and name.isprintable()
)
STATES = st.dictionaries(NAMES, st.integers(0, len(TENSORS) - 1), min_size=1, max_size=8)


def is_tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.numel()) and (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())


def check(found: dict[str, Any], given_state: dict[str, torch.Tensor], chosen: dict[str, int], form: str) -> None:
    assert found.keys() == given_state.keys()
    for name, tensor in given_state.items():
        same = found[name]
        assert same.dtype == tensor.dtype
        assert torch.equal(same, tensor)
        if form == "f.pth":
            assert type(same) is type(tensor)
            assert same.requires_grad == tensor.requires_grad
    for (one, first), (other, second) in itertools.combinations(chosen.items(), 2):
        if first == second:
            assert is_tied(found[one], found[other]) or not found[one].numel()
            assert form != "f.pth" or found[one] is found[other]
        elif form == "f.pth" and max(first, second) < 5:
            shared = [found[name].untyped_storage().data_ptr() for name in (one, other)]
            assert shared[0] == shared[1]


@settings(max_examples=settings().max_examples // 4)
@given(STATES, st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)))
@example({"i": 0, "tie": 0}, "f.safetensors", "f.pth")
@example({"format": 1, "a": 1, "sluice.tied_names": 1}, "shards", "f.pth")
@example({"a": 9, "b": 10, "c": 10}, "f.safetensors", "model")
@example({"a": 11, "b": 11, "c": 7}, "f.pth", "f.pth")
@example({"a": 1, "b": 7, "c": 7, "d": 1}, "f.pth", "model")
def test_what_was_given_comes_back(chosen: dict[str, int], first: str, second: str) -> None:
    state = {name: TENSORS[number] for name, number in chosen.items()}
    with tempfile.TemporaryDirectory() as directory:
        saved, converted = Path(directory, "one", first), Path(directory, "two", second)
        saved.parent.mkdir()
        converted.parent.mkdir()
        manifest = Path(directory, "m.json")
        report = sluice.save(state, saved, manifest=manifest, **FORMS[first])
        assert report.tensors == len(state)
        check(sluice.load_state_dict(saved), state, chosen, first)
        assert json.loads(manifest.read_text(encoding="utf-8"))["tensors"].keys() == state.keys()
        assert sluice.verify(saved, manifest=manifest).ok
        report = sluice.convert(saved, converted, **FORMS[second])
        assert report.tensors == len(state)
        check(sluice.load_state_dict(converted), state, chosen, "f.pth" if first == second == "f.pth" else "")
        assert sluice.verify(converted, manifest=manifest).ok
        assert sluice.diff(saved, converted).common == len(state)


def test_a_nested_state_comes_back_and_every_place_of_a_tensor_counts(tmp_path: Path) -> None:
    inner = {"w": BASE, "v": BASE[3:9]}
    state = {"model": inner, "ema": [{"w": BASE}, BASE[:0]], "step": 3}
    report = sluice.save(state, tmp_path / "f.pt")
    assert report.tensors == 4
    assert sluice.convert(tmp_path / "f.pt", tmp_path / "g.pt").tensors == 4
    found = torch.load(tmp_path / "g.pt", weights_only=True)
    assert torch.equal(found["ema"][0]["w"], BASE)
    assert found["ema"][0]["w"].data_ptr() == found["model"]["w"].data_ptr()
    cycle: dict[str, Any] = {"w": BASE}
    cycle["self"] = cycle
    assert sluice.save(cycle, tmp_path / "c.pt").tensors == 1


def test_python_attributes_do_not_untie_parameters(tmp_path: Path) -> None:
    weight: Any = nn.Parameter(torch.ones(3))
    weight.mark = "x"
    torch.save({"a": weight, "b": weight}, tmp_path / "f.pt")
    for form, arguments in FORMS.items():
        assert sluice.convert(tmp_path / "f.pt", tmp_path / form, **arguments).tensors == 2
        found = sluice.load_state_dict(tmp_path / form)
        assert is_tied(found["a"], found["b"])
        assert getattr(found["b"], "mark", None) == ("x" if form == "f.pth" else None)
    torch.save({"one": {"weight": weight}, "two": {"weight": nn.Parameter(torch.ones(3))}}, tmp_path / "two.pt")
    with pytest.raises(sluice.MismatchError, match="more than one part"):
        sluice.load_into(nn.LayerNorm(3, bias=False), tmp_path / "two.pt")


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_model_without_ties_loads_the_checkpoint_of_a_tied_one(tmp_path: Path, form: str) -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    sluice.save({"0.weight": weight, "1.weight": weight}, tmp_path / form, **FORMS[form])
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    sluice.load_into(model, tmp_path / form)
    assert all(torch.equal(parameter, weight) for parameter in model.parameters())
    assert model[0].weight is not model[1].weight
    model[1].weight = model[0].weight
    sluice.load_into(model, tmp_path / form)
    assert model[0].weight is model[1].weight
