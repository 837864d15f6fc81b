"""``load_into`` and ``load_state_dict`` against torch and safetensors."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import sluice
from support.oracles import save_and_compare, state_dict_of_views
from support.trained_net import TOKENS, Net, assert_equal, empty, trained


def saved(path: Path) -> Net:
    """Write a model and return it."""
    model = trained()
    if path.suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        safetensors.torch.save_model(model, str(path))
    return model


@pytest.fixture(params=["f.pth", "f.safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_an_empty_model_becomes_the_saved_one(file: Path) -> None:
    expected = saved(file)
    model = empty(Net).eval()
    report = sluice.load_into(model, file)
    assert_equal(model, expected)
    assert torch.equal(model(TOKENS), expected(TOKENS))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.first.frequencies, expected.first.frequencies)
    assert ("embedding.weight", "head.weight") in report.tied
    loaded = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    assert (report.tensors, report.final_bytes) == (len(loaded), sum(tensor.nbytes for tensor in loaded.values()))
    assert report.final_bytes <= report.read_bytes <= report.final_bytes + 4096  # gaps between small neighbors
    assert report.reads == {"direct": 0, "buffered": report.read_bytes}
    assert report.measured is not None


def test_dtype_none_keeps_the_models_auto_takes_the_files_and_others_cast_what_is_loaded(file: Path) -> None:
    expected = saved(file)
    cast = empty(Net)
    sluice.load_into(cast, file, dtype=torch.bfloat16)
    assert cast.first.frequencies.dtype == torch.float32
    assert cast.get_buffer("norm.num_batches_tracked").dtype == torch.int64
    assert torch.equal(cast.embedding.weight, expected.embedding.weight.to(torch.bfloat16))
    model = empty(Net).to(torch.bfloat16)
    report = sluice.load_into(model, file)
    assert_equal(model, expected.to(torch.bfloat16))
    assert report.cast["float32->bfloat16"] == 12
    again = empty(Net).to(torch.bfloat16)
    sluice.load_into(again, file, dtype="auto")
    assert again.embedding.weight.dtype == torch.float32


def test_views_ties_strides_parameters_and_plain_values(tmp_path: Path) -> None:
    state_dict = state_dict_of_views(
        step=7,
        name="run",
        nested={"inner": [torch.arange(3), 2.5, None]},
    )
    ours = save_and_compare(tmp_path / "f.pth", state_dict)
    assert ours["tied"] is ours["whole"]
    assert ours["rows"].untyped_storage().data_ptr() == ours["whole"].untyped_storage().data_ptr()
    assert ours["transposed"].stride() == (1, 7)
    assert ours["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert ours["expanded"].stride() == (0, 1)


def test_dtype_casts_real_floating_point_only(tmp_path: Path) -> None:
    state_dict = {"f": torch.randn(9), "i": torch.arange(3), "b": torch.tensor([True]), "c": torch.randn(2) * 1j}
    torch.save(state_dict, tmp_path / "f.pth")
    ours = sluice.load_state_dict(tmp_path / "f.pth", dtype=torch.bfloat16)
    assert torch.equal(ours["f"], state_dict["f"].to(torch.bfloat16))
    assert [ours[name].dtype for name in "ibc"] == [torch.int64, torch.bool, torch.complex64]


def test_objects_that_need_code_are_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "f.pth"
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, path)
    assert torch.equal(sluice.load_state_dict(path)["w"], torch.ones(2))
    with sluice.open(path) as checkpoint:
        assert repr(checkpoint.tree["args"]) == "<not loaded: argparse.Namespace>"
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=1)}, path)
    with pytest.raises(sluice.UnsafeContentError, match=r"tensor 'args'.*found argparse\.Namespace"):
        sluice.load_state_dict(path)


def test_tensors_hidden_in_the_module_versions_are_loaded_as_torch_does(tmp_path: Path) -> None:
    state_dict = OrderedDict(w=torch.ones(2))
    state_dict._metadata = OrderedDict({"": {"version": 1, "extra": torch.arange(3)}})  # type: ignore[attr-defined]
    torch.save(state_dict, tmp_path / "f.pth")
    ours: Any = sluice.load_state_dict(tmp_path / "f.pth")
    assert ours._metadata[""]["version"] == 1
    assert torch.equal(ours._metadata[""]["extra"], torch.arange(3))
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        assert checkpoint.tree._metadata[""]["extra"].shape == (3,)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("legacy", [False, True])
def test_storages_without_a_tensor_are_those_of_torch(tmp_path: Path, legacy: bool) -> None:
    weight: Any = torch.arange(6.0)
    some: Any = torch.arange(9, dtype=torch.uint8)
    typed, path = weight.view(2, 3), tmp_path / "f.pt"
    untyped = some.storage() if legacy else some.untyped_storage()
    state = {"w": typed, "s": weight.storage(), "u": untyped, "again": untyped, "in": [(untyped, 1)]}
    torch.save({**state, "half": weight.half().storage()}, path, _use_new_zipfile_serialization=not legacy)
    sluice.convert(path, tmp_path / "g.pt")
    theirs = torch.load(path, weights_only=True)
    for found in (sluice.load_state_dict(path), torch.load(tmp_path / "g.pt", weights_only=True)):
        assert list(found) == list(theirs)
        for name in ("s", "u", "half"):
            assert type(found[name]) is type(theirs[name])
            assert found[name].dtype == theirs[name].dtype
            assert found[name]._untyped_storage.tolist() == theirs[name]._untyped_storage.tolist()
        assert found["again"] is found["u"] is found["in"][0][0]
        assert found["s"]._untyped_storage.data_ptr() == found["w"].data_ptr()
        assert torch.equal(found["w"], typed)
    report = sluice.convert(path, tmp_path / "f.safetensors")
    assert "values that are not tensors were left out" in report.notes[0]
    assert list(sluice.load_state_dict(tmp_path / "f.safetensors")) == ["w"]


def test_a_file_that_is_a_storage_is_a_checkpoint_of_one_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(9, dtype=torch.uint8).untyped_storage(), tmp_path / "f.pt")
    with sluice.open(tmp_path / "f.pt") as checkpoint:
        assert torch.equal(checkpoint[""].read(), torch.arange(9, dtype=torch.uint8))
    assert sluice.verify(tmp_path / "f.pt").ok


@pytest.mark.parametrize(
    "keys",
    [(0, 1), ((1, 2), (3, "x")), (0, "a"), (1.5, None, True, b"x"), ("k" * 5000, "m.n" * 100_000)],
    ids=["integers", "tuples", "mixed", "others", "long"],
)
def test_keys_of_every_type_and_length_are_those_of_torch(tmp_path: Path, keys: tuple[object, ...]) -> None:
    torch.save({key: torch.full((3,), float(number)) for number, key in enumerate(keys)}, tmp_path / "f.pt")
    ours, theirs = sluice.load_state_dict(tmp_path / "f.pt"), torch.load(tmp_path / "f.pt", weights_only=True)
    assert list(ours) == list(theirs) == list(keys)
    assert all(torch.equal(one, other) for one, other in zip(ours.values(), theirs.values(), strict=True))


def test_long_keys_above_many_values_are_bounded(tmp_path: Path) -> None:
    inner = {str(number): number for number in range(2000)}
    torch.save({"a" * 60_000: inner, "w": torch.ones(1)}, tmp_path / "f.pt")
    with pytest.raises(sluice.LimitError, match="dotted names"):
        sluice.open(tmp_path / "f.pt")
    sluice.open(tmp_path / "f.pt", limits=sluice.Limits(header_bytes=200_000_000)).close()
