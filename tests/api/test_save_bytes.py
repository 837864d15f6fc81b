"""Files of saves and conversions: deterministic, with aligned data, for every dtype and size."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import sluice
from sluice.records import row_major
from sluice.writing.durable.replacement import Replacement
from sluice.writing.pickle_walk import walk_object
from sluice.writing.save_formats import ConvertFormat
from sluice.writing.torch_pickle import pickle_object
from sluice.writing.torch_tensors import dense, stored
from sluice.writing.torch_zip import TorchZipWriter
from support.directories import contents, forms
from support.dtypes import TORCH_DTYPES, any_bits, needs_float4
from support.oracles import bits, same
from support.watching import raising, watch

FORMS = forms(200)
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def save(form: str, state: Any, path: Path, **how: Any) -> None:
    sluice.save(state, path, **FORMS[form], **how)


#: Dtypes that the safetensors format lacks.
ABSENT = {"complex32", "complex128"}


def state() -> dict[str, torch.Tensor]:
    tied = torch.arange(20.0)
    return {"a": tied, "b": torch.arange(21).reshape(3, 7), "c": tied, "d": torch.arange(30.0).view(5, 6).t().half()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@EVERY_FORM
def test_every_dtype(tmp_path: Path, form: str) -> None:
    value = {name: any_bits(name, 12) for name in TORCH_DTYPES}
    if form != "model.pth":
        for name in ABSENT:
            with pytest.raises(sluice.SaveError, match=f"does not support this dtype; found {name}"):
                save(form, {name: value.pop(name)}, tmp_path / form)
    save(form, value, tmp_path / form)
    found = sluice.load_state_dict(tmp_path / form)
    assert set(found) == set(value)
    if form == "model.pth":
        for mmap in (False, True):
            assert same(torch.load(tmp_path / form, weights_only=True, mmap=mmap), dict(found))
    if form == "model.safetensors":
        assert same(safetensors.torch.load_file(tmp_path / form), found)
    for name, tensor in value.items():
        assert found[name].dtype == tensor.dtype
        assert bits(found[name]) == bits(tensor), name


@needs_float4
def test_a_packed_dtype_needs_a_dimension(tmp_path: Path) -> None:
    with pytest.raises(sluice.SaveError, match="packed values of a 0-d tensor"):
        save("model.safetensors", {"a": torch.zeros((), dtype=torch.float4_e2m1fn_x2)}, tmp_path / "f.safetensors")
    assert not list(tmp_path.iterdir())


@EVERY_FORM
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
        save(form, state(), place / form)
        torch.save(state(), tmp_path / "in.pt")
        sluice.convert(tmp_path / "in.pt", place / f"converted-{form}", **FORMS[form])
    for name in (form, f"converted-{form}"):
        assert contents(first / name) == contents(second / name)
        assert contents(first / name)


def test_a_torch_file_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    """The first storage is a hole of the file, so it takes neither memory nor disk space."""
    huge, late = 5 << 30, torch.arange(3.0)
    tree = {"huge": object(), "late": object()}
    walked = walk_object(tree, lambda _: {})
    views = [row_major("uint8", (huge,), 0), row_major("float32", (3,), 1)]
    described = [dense(view, stored(view, view.numel)) for view in views]
    made = TorchZipWriter(pickle_object(tree, walked, described), [huge, 12])
    with Replacement(tmp_path / "f.pt", overwrite=False) as file:
        made.write(file.write_at, 1, 0, late.numpy().tobytes())
        assert made.finish(file.write_at) == made.file_bytes > huge
        file.commit()
    assert (tmp_path / "f.pt").stat().st_blocks * 512 < 1 << 20, "the file system has no holes"
    found = torch.load(tmp_path / "f.pt", weights_only=True, mmap=True)
    assert found["huge"].shape == (huge,)
    assert int(found["huge"][-1]) == 0
    assert torch.equal(found["late"], late)
    with sluice.open(tmp_path / "f.pt") as checkpoint:
        assert checkpoint["huge"].nbytes == huge
        assert torch.equal(checkpoint["late"].read(), late)
        assert int(checkpoint["huge"][huge - 1 :].read()) == 0
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert archive.read("archive/data/1") == late.numpy().tobytes()


@pytest.mark.parametrize("form", list(FORMS)[1:])
def test_metadata_is_in_every_header(tmp_path: Path, form: str) -> None:
    save(form, state(), tmp_path / form, metadata={"made by": "ü", "format": "mine"})
    path = tmp_path / form
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    assert len(files) == (3 if form == "sharded" else 1)
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata()["made by"] == "ü"
            assert opened.metadata()["format"] == "mine"
    with sluice.open(path) as checkpoint:
        assert checkpoint.metadata["made by"] == "ü"
    if form == "sharded":
        index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert set(index["weight_map"].values()) == {file.name for file in files}


def test_metadata_that_has_no_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metadata is written to the header of safetensors files"):
        save("model.pth", state(), tmp_path / "f.pth", metadata={"a": "b"})
    for wrong in ({"a": 1}, {1: "a"}):
        with pytest.raises(sluice.SaveError, match="safetensors metadata must map text to text"):
            save("model.safetensors", state(), tmp_path / "f.safetensors", metadata=wrong)
    assert not list(tmp_path.iterdir())


def test_metadata_under_the_name_of_a_tied_tensor(tmp_path: Path) -> None:
    save("model.safetensors", state(), tmp_path / "f.safetensors", metadata={"c": "text"})
    with sluice.open(tmp_path / "f.safetensors") as checkpoint:
        assert checkpoint.metadata["c"] == "text"
        assert checkpoint["c"].entry is checkpoint["a"].entry


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("f.pt", "safetensors"),
        ("f.bin", "huggingface"),
        ("f.CKPT", "huggingface"),
        ("f.safetensors", "torch"),
        ("f.safetensors", "huggingface"),
    ],
)
def test_a_format_that_contradicts_the_suffix(tmp_path: Path, name: str, form: ConvertFormat) -> None:
    torch.save(state(), tmp_path / "in")
    with pytest.raises(ValueError, match=f"format='{form}' contradicts the suffix"):
        sluice.save(state(), tmp_path / name, format=form)
    with pytest.raises(ValueError, match=f"format='{form}' contradicts the suffix"):
        sluice.convert(tmp_path / "in", tmp_path / name, format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["f.pt", "f.PTH", "f.ckpt", "f.bin", "no suffix", "f.xyz"])
def test_a_format_that_matches_the_suffix_or_a_suffix_without_format(tmp_path: Path, name: str) -> None:
    sluice.save({"a": torch.ones(2)}, tmp_path / name, format="torch")
    assert same(torch.load(tmp_path / name, weights_only=True), {"a": torch.ones(2)})


@EVERY_FORM
def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    save(form, state(), tmp_path / f"whole-{form}")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, memoryview(data)[:5], offset))
    save(form, state(), tmp_path / f"short-{form}")
    assert contents(tmp_path / f"short-{form}") == contents(tmp_path / f"whole-{form}")


@EVERY_FORM
def test_a_write_that_writes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    save(form, state(), tmp_path / form)
    before = contents(tmp_path / form)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(sluice.SaveError, match="nothing was written"):
        save(form, state(), tmp_path / form, overwrite=True)
    assert contents(tmp_path / form) == before
    assert [path.name for path in tmp_path.iterdir()] == [form]


@EVERY_FORM
def test_an_exception_in_any_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    save(form, state(), tmp_path / form)
    before = contents(tmp_path / form)
    for at in itertools.count(1):
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            watch(patch, os, "pwrite", raising(at, KeyboardInterrupt()))
            save(form, {name: tensor + 1 for name, tensor in state().items()}, tmp_path / form, overwrite=True)
            break
        assert contents(tmp_path / form) == before
        assert [path.name for path in tmp_path.iterdir()] == [form]
    assert at > 2
    assert contents(tmp_path / form) != before
