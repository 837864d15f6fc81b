"""Conversions of every format into every form, and of any object into a torch file."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice import rules
from support import directories, distributed
from support.directories import Tensors, assert_same
from support.oracles import same
from support.torch_files import saved_big_endian


def tensors() -> Tensors:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(300, 400),
        "half": torch.randn(7, 5).half(),
        "ints": torch.arange(11),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "brain": torch.randn(33).bfloat16(),
    }


def write_distributed(path: Path, state: Tensors) -> Path:
    stored = {
        name: distributed.chunks(tensor, [((0,) * tensor.dim(), tuple(tensor.shape))]) for name, tensor in state.items()
    }
    stored["wide"] = distributed.rows(state["wide"], 4, files=2)
    return distributed.write(path, stored)


SOURCES: list[Callable[[Path, Tensors], Path]] = [
    directories.write_zip,
    directories.write_legacy,
    directories.write_safetensors,
    directories.write_shards,
    directories.write_parameters,
    write_distributed,
]


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """Read with the library of the format."""
    if path.suffix == ".pt":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # the CRC of every record
        loaded = torch.load(path, weights_only=True)
        assert same(torch.load(path, weights_only=True, mmap=True), loaded)
        return dict(loaded)
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = set(index["weight_map"].values())
    return {name: t for file in files for name, t in safetensors.torch.load_file(path / file).items()}


@pytest.mark.parametrize("to", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["out.pt", "out.safetensors", "sharded"])
@pytest.mark.parametrize("write", SOURCES, ids=lambda write: write.__name__)
def test_every_source_becomes_every_form(
    tmp_path: Path, write: Callable[[Path, Tensors], Path], form: str, to: torch.dtype | None
) -> None:
    state = tensors()
    (tmp_path / "in").mkdir()
    source = write(tmp_path / "in", state)
    most = 100_000 if form == "sharded" else None
    report = sluice.convert(source, tmp_path / form, max_shard_size=most, dtype=to)
    expected = {name: t.to(to) if to and t.is_floating_point() else t for name, t in state.items()}
    assert_same(read_back(tmp_path / form), expected)
    assert report.tensors == len(state)
    assert report.nbytes == sum(t.nbytes for t in expected.values())
    assert [os.path.getsize(file) for file in report.files] == list(report.file_bytes)
    assert sum(report.casts.values()) == sum(state[name].dtype != t.dtype for name, t in expected.items())
    assert {path.name for path in tmp_path.iterdir()} == {"in", form}


def test_a_training_state_is_converted_to_a_torch_file_as_a_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), 7: {"deep": [[torch.ones(1)]]}}
    torch.save(state, tmp_path / "run.pt")
    report = sluice.convert(tmp_path / "run.pt", tmp_path / "again.pt")
    found = torch.load(tmp_path / "again.pt", weights_only=True)
    assert same(found, torch.load(tmp_path / "run.pt", weights_only=True))
    assert vars(found["model"]) == vars(state["model"])
    assert not report.notes
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(found["optimizer"])


def test_a_flat_form_takes_the_state_dict_and_reports_omitted_values(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(3, 3), "epoch": 4},
        "optimizer": {"state": {0: {"m": torch.ones(9)}}, "param_groups": []},
    }
    torch.save(state, tmp_path / "run.pt")
    report = sluice.convert(tmp_path / "run.pt", tmp_path / "m.safetensors")
    assert_same(read_back(tmp_path / "m.safetensors"), {"w": torch.ones(3, 3)})
    notes = "\n".join(report.notes)
    assert "only 'model' was taken: 1 tensors" in notes
    assert "values that are not tensors were left out (1): 'epoch'" in notes
    sluice.convert(tmp_path / "run.pt", tmp_path / "o.safetensors", key="optimizer.state")
    assert_same(read_back(tmp_path / "o.safetensors"), {"0.m": torch.ones(9)})
    torch.save(
        {"a": {"v": torch.ones(1), "w": torch.ones(3, 3), "epoch": 4}, "b": {"w": torch.ones(3, 3)}},
        tmp_path / "two.pt",
    )
    with pytest.raises(sluice.MismatchError, match="more than one state dict"):
        sluice.convert(tmp_path / "two.pt", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_tied_tensors_are_stored_once_in_flat_files_and_keep_their_names(tmp_path: Path) -> None:
    base = torch.randn(50, 8)
    state = OrderedDict(b=base, a=base, turned=base.t(), rows=base[10:20], far=torch.randn(1000)[900:910])
    torch.save(state, tmp_path / "in.pt")
    sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt", dtype=torch.float64)
    far = torch.load(tmp_path / "out.pt", weights_only=True)["far"]
    assert far.untyped_storage().nbytes() == 80  # only the needed part of the thousand elements
    report = sluice.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert report.tied == {"b": "a"}
    assert_same(read_back(tmp_path / "out.safetensors"), {k: t for k, t in state.items() if k != "b"})
    sluice.convert(tmp_path / "out.safetensors", tmp_path / "back.pt", rename={"a": "x"})
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["x"].data_ptr() == back["b"].data_ptr()  # the header keeps the name of the tied tensor
    report = sluice.convert(tmp_path / "out.safetensors", tmp_path / "named.safetensors", rename={"a": "x"})
    assert report.tied == {"x": "b"}


def test_rules_apply_while_bytes_pass(tmp_path: Path) -> None:
    state = {"q": torch.randn(6, 4), "k": torch.randn(6, 4), "w": torch.randn(40, 30), "f": torch.randn(3, 3)}
    torch.save({"model": state, "step": 1}, tmp_path / "in.pt")
    wanted = [
        rules.concatenate(("q", "k"), "qk", dim=1),
        rules.transpose("w"),
        rules.scale("f", 0.5),
        rules.resize("f", 4),
    ]
    expected = {
        "qk": torch.cat([state["q"], state["k"]], 1),
        "w": state["w"].t(),
        "f": torch.cat([state["f"] * 0.5, torch.zeros(1, 3)]),
    }
    for name in ("out.safetensors", "out.pt"):
        report = sluice.convert(tmp_path / "in.pt", tmp_path / name, rules=wanted)
        assert report.tensors == 3
        assert_same(read_back(tmp_path / name), expected)


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_parts_that_reach_a_large_tensor_in_short_runs(tmp_path: Path, name: str) -> None:
    state = {"q": torch.randn(600, 600), "k": torch.randn(600, 600), "small": torch.randn(9, 9)}
    torch.save(state, tmp_path / "in.pt")
    wanted = [rules.concatenate(("q", "k"), "qk", dim=1), rules.transpose("small")]
    memory = sluice.MemoryLimits(staging="2MiB")  # half of it is smaller than the joined tensor
    sluice.convert(tmp_path / "in.pt", tmp_path / name, rules=wanted, memory=memory, dtype=torch.float64)
    expected = {"qk": torch.cat([state["q"], state["k"]], 1).double(), "small": state["small"].t().double()}
    assert_same(read_back(tmp_path / name), expected)


def test_big_endian_files_are_byteswapped(tmp_path: Path) -> None:
    state = {"w": torch.randn(40, 30), "t": torch.randn(30, 40).t(), "c": torch.randn(9, dtype=torch.complex64)}
    path = tmp_path / "big.pt"
    path.write_bytes(saved_big_endian(state))
    expected = torch.load(path, weights_only=True)
    for name in ("out.safetensors", "out.pt"):
        sluice.convert(path, tmp_path / name)
        assert_same(read_back(tmp_path / name), expected)


#: A directory in memory, if the system has one: on a disk each file would wait for its sync.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]


@st.composite
def drawn_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view of a storage: any dtype, order of dimensions, step and start."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(_DTYPES))
    base = torch.randint(0, 2, shape or [1]).to(dtype)
    base = base if shape else base[0]
    if base.dim() and draw(st.booleans()):
        base = base.permute(draw(st.permutations(range(base.dim()))))
    if base.dim() and base.shape[0] > 1 and draw(st.booleans()):
        base = base[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
    if base.dim() and draw(st.booleans()):
        base = base[None].expand(draw(st.integers(1, 3)), *base.shape)
    if dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(base, requires_grad=draw(st.booleans()))
    return base.conj() if dtype.is_complex and draw(st.booleans()) else base


#: Without empty bytes objects: their pickle calls ``bytes``, which torch refuses.
_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(min_size=1, max_size=5),
)


def trees() -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=4), st.integers(-3, 3))
    return st.recursive(
        st.one_of(drawn_tensors(), _PLAIN),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=8,
    )


@settings(max_examples=50, deadline=None)
@given(trees(), st.sampled_from([True, False]))
def test_a_torch_file_holds_the_same_object(tree: object, zipped: bool) -> None:
    content = io.BytesIO()
    torch.save(tree, content, _use_new_zipfile_serialization=zipped)
    content.seek(0)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        path = Path(directory) / "out.pt"
        sluice.convert(content, path)
        content.seek(0)
        expected = torch.load(content, weights_only=True)
        assert same(torch.load(path, weights_only=True), expected)
        assert same(torch.load(path, weights_only=True, mmap=True), expected)
