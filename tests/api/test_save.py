"""``sluice.save``: read back with torch, safetensors, transformers' index and sluice itself.

Round trips through ``save`` and ``convert``: names, values and ties come back in every form.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import sluice
from support.directories import forms
from support.oracles import same
from support.trained_net import assert_equal, empty, trained


@pytest.mark.parametrize("names", ["empty last", "last empty", "empty"])
def test_an_empty_view_needs_nothing_of_its_storage(tmp_path: Path, names: str) -> None:
    base = torch.arange(1000.0)
    views = {"empty": base[500:500].view(0, 3), "last": base[-1:]}
    state = {name: views[name] for name in names.split()}
    sluice.save(state, tmp_path / "f.pt", manifest=tmp_path / "m.json")
    assert (tmp_path / "f.pt").stat().st_size < 2000
    loaded = torch.load(tmp_path / "f.pt", weights_only=True)
    assert all(same(loaded[name], tensor) for name, tensor in state.items())
    assert sluice.verify(tmp_path / "f.pt", manifest=tmp_path / "m.json").ok


def test_tensors_that_share_memory_with_their_conjugate_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.randn(4, dtype=torch.complex64)
    state = {"plain": base, "conjugate": base.conj(), "negative": base.conj().imag}
    sluice.save(state, tmp_path / "f.pt")
    loaded = torch.load(tmp_path / "f.pt", weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["f.pt", "f.safetensors", "directory"])
def test_a_module_comes_back_with_its_ties(tmp_path: Path, name: str) -> None:
    model, other = trained(), empty()
    report = sluice.save(model, tmp_path / name)
    sluice.load_into(other, tmp_path / name)
    assert other.head.weight is other.embedding.weight
    assert_equal(other, model)
    if name == "f.pt":
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert vars(loaded)["_metadata"] == vars(model.state_dict())["_metadata"]
    else:
        assert report.tied["head.weight"] == "embedding.weight"
    if name == "f.safetensors":
        assert not any(safetensors.torch.load_model(model, tmp_path / name))


def test_an_optimizer_is_saved_as_its_state(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(4, 2).parameters())
    sluice.save(optimizer, tmp_path / "o.pt")
    assert torch.load(tmp_path / "o.pt", weights_only=True) == optimizer.state_dict()


@pytest.mark.parametrize("first", [900, None])
@pytest.mark.parametrize("second", [900, None])
def test_a_model_directory_is_replaced_and_nothing_stale_stays(
    tmp_path: Path, first: int | None, second: int | None
) -> None:
    old = {f"old.{i}": torch.randn(10, 10) for i in range(5)}
    new = {f"new.{i}": torch.randn(10, 10) for i in range(5)}
    sluice.save(old, tmp_path / "m", format="huggingface", max_shard_size=first)
    before = {str(path) for path in (tmp_path / "m").iterdir()}
    (tmp_path / "m" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "m" / "link").symlink_to("config.json")
    report = sluice.save(new, tmp_path / "m", format="huggingface", max_shard_size=second, overwrite=True)
    assert set(report.replaced) == before
    assert set(sluice.load_state_dict(tmp_path / "m")) == set(new)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "config.json",
        "link",
        *(Path(file).name for file in report.files),
    }
    assert (tmp_path / "m" / "link").is_symlink()


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "config.json", "b": "x\\u0000.safetensors"}}', "[" * 200_000])
def test_a_damaged_index_of_an_old_model_costs_no_other_file(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    sluice.save({"a": torch.ones(2)}, tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


class Mine:
    """A class that ``torch.load(weights_only=True)`` refuses."""


ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("state", "name", "problem"),
    [
        ({"a": Mine()}, "f.pt", "an object of Mine"),
        ({"a": print}, "f.pt", "found print"),
        ({"a": Mine}, "f.pt", "found Mine"),
        ({"a": 1 << 2040}, "f.pt", "the integer is too large for torch.load"),
        ({"a": frozenset({1})}, "f.pt", "an object of frozenset"),
        ({"a": torch.ones(2, device="meta")}, "f.safetensors", "meta device have no values"),
        ({"a": ZEROS, "b": ZEROS.view(torch.int32)}, "f.pt", "different dtypes share one storage"),
        ({"a": 1}, "f.safetensors", "tensors only; .* found int"),
        ({1: torch.ones(1)}, "f.safetensors", "tensor names must be strings"),
        ([torch.ones(1)], "f.safetensors", "can only hold a state dict; found list"),
        ({"__metadata__": torch.ones(1)}, "f.safetensors", "safetensors reserves this name"),
        ({"\ud800": torch.ones(1)}, "f.safetensors", "lone surrogate"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_made(
    tmp_path: Path, state: dict[str, object], name: str, problem: str
) -> None:
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(sluice.SaveError, match=problem):
        sluice.save(state, tmp_path / name, overwrite=True)
    assert (tmp_path / name).read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["f.safetensors", "f.pt", "directory", "dcp"])
@pytest.mark.parametrize("nbytes", [0, 8])  # parameters: pytest would crash if it showed such a tensor
def test_a_tensor_without_its_memory_is_refused(tmp_path: Path, name: str, nbytes: int) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0)[10:10]}
    for tensor in state.values():
        tensor.untyped_storage().resize_(nbytes)
    with pytest.raises(sluice.SaveError, match="its storage was freed or shrunk"):
        sluice.save(state, tmp_path / name, format="dcp" if name == "dcp" else None)
    assert not list(tmp_path.iterdir())


def test_a_module_that_a_failed_load_has_changed_is_refused_until_it_is_restored(tmp_path: Path) -> None:
    model, path = nn.Linear(600, 600), tmp_path / "f.pth"
    sluice.save(model, path)
    with pytest.raises(sluice.PartialLoadError):
        sluice.load_into(model, path, progress=mock.Mock(side_effect=ValueError))
    with pytest.raises(sluice.SaveError, match="a failed load has changed"):
        sluice.save(model, tmp_path / "g.pth")
    model.load_state_dict(torch.load(path))
    sluice.save(model, tmp_path / "g.pth")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(sluice.SaveError, match="tensor 'a': a nested tensor cannot be written"):
        sluice.save({"a": tensor}, tmp_path / "f.safetensors")


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no format for the suffix '\.xyz'"):
        sluice.save({}, tmp_path / "f.xyz")
    with pytest.raises(ValueError, match="unknown format 'zip': one of safetensors, torch"):
        sluice.save({}, tmp_path / "f", format="zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="so it only reads such files"):
        sluice.save({}, tmp_path / "f", format="per-parameter")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path is empty"):
        sluice.save({}, "")
    with pytest.raises(TypeError, match="overwrite= is a str, not True or False"):
        sluice.save({}, tmp_path / "f.pt", overwrite="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_shard_size applies to a directory"):
        sluice.save({}, tmp_path / "f.pt", format="torch", max_shard_size=1)


@pytest.mark.parametrize(
    ("name", "form"), [("f.safetensors", "safetensors"), ("f.pt", "torch"), ("model", "huggingface")]
)
def test_progress_and_a_report_that_counts_the_names_that_were_given(tmp_path: Path, name: str, form: str) -> None:
    tensor, seen = torch.ones(3), list[sluice.ProgressEvent]()
    state = {"one": tensor, "two": tensor, "three": torch.zeros(2)}
    report = sluice.save(state, tmp_path / name, progress=seen.append)
    assert (seen[-1].fraction, seen[-1].total_bytes) == (1.0, report.nbytes)
    assert str(report).startswith(f"wrote 3 of 3 tensors to {tmp_path / name} (")
    assert (report.taken, report.total, report.to_json()["format"]) == (3, 3, form)


FORMS = forms(64)

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
        back = found[name]
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        if form == "model.pth":
            assert type(back) is type(tensor)
            assert back.requires_grad == tensor.requires_grad
    for (one, first), (other, second) in itertools.combinations(chosen.items(), 2):
        if first == second:
            assert is_tied(found[one], found[other]) or not found[one].numel()
            assert form != "model.pth" or found[one] is found[other]
        elif form == "model.pth" and max(first, second) < 5:
            shared = [found[name].untyped_storage().data_ptr() for name in (one, other)]
            assert shared[0] == shared[1]


@settings(max_examples=settings().max_examples // 4)
@given(STATES, st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)))
@example({"i": 0, "tie": 0}, "model.safetensors", "model.pth")
@example({"format": 1, "a": 1, "sluice.tied_names": 1}, "sharded", "model.pth")
@example({"a": 9, "b": 10, "c": 10}, "model.safetensors", "whole")
@example({"a": 11, "b": 11, "c": 7}, "model.pth", "model.pth")
@example({"a": 1, "b": 7, "c": 7, "d": 1}, "model.pth", "whole")
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
        check(sluice.load_state_dict(converted), state, chosen, "model.pth" if first == second == "model.pth" else "")
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
        assert getattr(found["b"], "mark", None) == ("x" if form == "model.pth" else None)
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
