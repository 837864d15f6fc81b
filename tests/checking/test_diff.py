"""``sluice.diff`` against a naive comparison of what torch loads, in any two formats."""

from __future__ import annotations

import cmath
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sluice
from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice.api import diff
from sluice.checking.comparison import Comparison
from support import distributed, fresh_process
from support.directories import write_parameters
from support.dtypes import TORCH_DTYPES, needs_float4
from support.watching import watch
from support.whole_checkpoints import MAKERS, Tensors, composites, plain_tensors, views

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per", "ignore:Sparse", "ignore:TypedStorage is deprecated"
)

FORMATS = ["torch-zip", "torch-legacy", "safetensors", "shards", "parameters", "distributed"]


def write(path: Path, kind: str, tensors: Tensors) -> Path:
    """Write tensors in a format, with their strides and shared storages if it supports them."""
    if kind in {"torch-zip", "torch-legacy"}:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "torch-zip")
    elif kind == "distributed":
        stored = {name: distributed.rows(one, 2 if len(one) % 2 == 0 else 1, files=2) for name, one in tensors.items()}
        distributed.write(path, stored)
    elif kind == "parameters":
        write_parameters(path, tensors)
    else:
        names = {"safetensors": "safetensors", "shards": "huggingface"}
        sluice.save(tensors, path, format=names[kind], max_shard_size=600 if kind == "shards" else None)  # type: ignore[arg-type]
    return path


def some() -> Tensors:
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(6, 8, generator=generator)
    return {
        "base": base,
        "transposed": torch.randn(8, 6, generator=generator).t(),
        "ints": torch.arange(40).reshape(4, 10),
        "half": torch.randn(30, generator=generator).to(torch.bfloat16),
    }


@pytest.fixture(params=[640, 24 << 20], ids=["small pieces", "usual pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SCAN_BATCH_BYTES", request.param)
    monkeypatch.setattr(defaults, "SCAN_WINDOW_BYTES", request.param // 4)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_any_two_formats(tmp_path: Path, first: str, second: str) -> None:
    a = write(tmp_path / "a", first, some())
    assert sluice.diff(a, write(tmp_path / "b", second, some())).same
    changed = some()
    changed["transposed"][2, 3] += 2
    changed["ints"][3, 9] = -1
    report = sluice.diff(a, write(tmp_path / "c", second, changed))
    found = {one.name: (one.kinds, one.different, one.elements, one.max_abs) for one in report.differences}
    assert found == {
        "transposed": (("values",), 1, 48, pytest.approx(2)),
        "ints": (("values",), 1, 40, 40.0),
    }
    assert report.common == 4


@pytest.mark.parametrize("name", MAKERS)
def test_every_checkpoint_is_the_same_as_itself(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path / "c")
    report = sluice.diff(tmp_path / "c", tmp_path / "c")
    assert report.same, report
    assert "the same" in str(report)


def test_presence_shape_and_dtype(tmp_path: Path) -> None:
    a, b = some(), some()
    b["model.base"] = b.pop("base")
    b["ints"] = b["ints"].to(torch.int32)
    b["half"] = b["half"].reshape(5, 6)
    b["new"] = torch.ones(1)
    report = sluice.diff(write(tmp_path / "a", "torch-zip", a), write(tmp_path / "b", "safetensors", b))
    found = {one.name: one for one in report.differences}
    assert list(found) == ["base", "ints", "half", "model.base", "new"]
    assert {name: one.kinds for name, one in found.items()} == {
        "base": ("only_a",),
        "ints": ("dtype",),
        "half": ("shape",),
        "model.base": ("only_b",),
        "new": ("only_b",),
    }
    assert (found["base"].similar, found["model.base"].similar, found["new"].similar) == ("model.base", "base", None)
    assert (found["base"].shape_a, found["base"].shape_b) == ((6, 8), None)
    assert (found["ints"].dtype_a, found["ints"].dtype_b) == ("int64", "int32")
    assert "'base': only in a; similar: model.base; a: float32" in str(found["base"])
    assert "only in a; similar: model.base" in str(report)
    assert json.loads(json.dumps(report.to_json()))["same"] is False


def test_ties_play_no_part(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    tied = {"embedding": weight, "head": weight}
    torch.save(tied, tmp_path / "tied.pt")
    torch.save({"embedding": weight, "head": weight.clone()}, tmp_path / "apart.pt")
    torch.save({"embedding": weight}, tmp_path / "one.pt")
    sluice.save(tied, tmp_path / "tied.safetensors")
    paths = [tmp_path / name for name in ("tied.pt", "apart.pt", "tied.safetensors")]
    for a in paths:
        for b in paths:
            assert sluice.diff(a, b).same, (a, b)
    report = sluice.diff(tmp_path / "tied.pt", tmp_path / "one.pt")
    assert report.same
    assert report.tied == ("head",)
    assert [one.name for one in sluice.diff(tmp_path / "one.pt", tmp_path / "apart.pt").differences] == ["head"]


def test_sparse_and_quantized_tensors_have_their_parts(tmp_path: Path) -> None:
    torch.save(composites(), tmp_path / "a.pt")
    other = composites()
    other["coo"].values()[1] += 1
    other["csr"] = torch.eye(4, 3).to_sparse_csr()
    other["bsc"] = other["bsc"].to_dense()
    other["tensorwise"] = torch.quantize_per_tensor(other["bsc"], 0.5, 3, torch.qint8)
    torch.save(other, tmp_path / "b.pt")
    found = {
        one.name: (one.kinds, one.different) for one in sluice.diff(tmp_path / "a.pt", tmp_path / "b.pt").differences
    }
    assert found == {
        "coo": (("values",), 1),
        "csr": (("layout",), 0),
        "bsc": (("layout",), 0),
        "tensorwise": (("layout",), 0),
    }


def test_unread_tensors_are_not_reported_as_equal(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "e4m3": torch.ones(3).to(torch.float8_e4m3fn)}
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    report = sluice.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [(one.name, one.kinds) for one in report.differences] == [("e4m3", ("unsupported",))]
    assert "'e4m3': not compared" in str(report.differences[0])
    assert "e4m3    not compared: sluice does not read it" in str(report)
    sluice.verify(tmp_path / "a.pt", hashes="sha256").write_manifest(tmp_path / "m.json")
    checked = sluice.verify(tmp_path / "b.pt", manifest=tmp_path / "m.json")
    assert [(one.tensor, one.kind) for one in checked.problems] == [("e4m3", "unsupported")]
    assert checked.unsupported == ("e4m3",)


def test_views_whose_storages_are_laid_out_otherwise(tmp_path: Path) -> None:
    dense = {name: one.resolve_conj().resolve_neg().contiguous() for name, one in views().items()}
    torch.save(views(), tmp_path / "a.pt")
    torch.save(dense, tmp_path / "b.pt")
    assert sluice.diff(tmp_path / "a.pt", tmp_path / "b.pt").same


DTYPES = [name for name in TORCH_DTYPES if name not in {"complex32", "float4_e2m1fn_x2"}]


def naive(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, float, float]:
    """Compare element by element in Python, where integers are exact."""
    different = nans = 0
    max_abs = max_rel = 0.0
    for one, other in zip(_values(a), _values(b), strict=True):
        nan = cmath.isnan(one), cmath.isnan(other)
        if one == other or all(nan):
            continue
        different += 1
        if any(nan):
            nans += 1
            continue
        finite = cmath.isfinite(one) and cmath.isfinite(other)
        distance = float(abs(one - other)) if finite else math.inf
        largest = float(max(abs(one), abs(other)))
        max_abs = max(max_abs, distance)
        max_rel = max(max_rel, distance / largest if math.isfinite(distance) and math.isfinite(largest) else math.inf)
    return different, nans, max_abs, max_rel


def _values(tensor: torch.Tensor) -> list[Any]:
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    values: list[Any] = tensor.flatten().tolist()
    return values


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two tensors of one shape, of equal dtypes or two dtypes of one kind, with many equal elements."""
    names = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    kinds = [torch_dtype(name) for name in names]
    if kinds[0].is_floating_point != kinds[1].is_floating_point or kinds[0].is_complex != kinds[1].is_complex:
        names = names[0], names[0]
    count = draw(st.integers(0, 12))
    made = []
    for name in names:
        size = ITEM_BYTES[name] * count
        raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
        if name == "bool":
            raw = bytearray(byte & 1 for byte in raw)
        made.append(torch.frombuffer(raw, dtype=torch_dtype(name)) if raw else torch.empty(0, dtype=torch_dtype(name)))
    a, b = made
    if names[0] == names[1] and count:
        kept = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        raw_a, raw_b = (one.view(torch.uint8).view(count, -1).clone() for one in (a, b))
        raw_b[kept] = raw_a[kept]
        b = raw_b.flatten().view(torch_dtype(names[0]))
    return a, b


@settings(max_examples=400)
@given(pairs())
def test_numbers_are_compared_as_a_naive_loop_does(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    found = Comparison(rtol=0, atol=0)
    found.update(a, b)
    different, nans, max_abs, max_rel = naive(a, b)
    assert (found.different, found.nan) == (different, nans)
    assert found.max_abs == pytest.approx(max_abs, rel=1e-12)
    assert found.max_rel == pytest.approx(max_rel, rel=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "rtol", "atol", "different"),
    [
        ([1.0, 2.0], [1.1, 2.1], 0.0, 0.11, 0),
        ([1.0, 2.0], [1.1, 2.2], 0.0, 0.11, 1),
        ([1.0, 100.0], [1.01, 101.0], 0.01, 0.0, 0),
        ([1.0, 100.0], [1.02, 101.0], 0.01, 0.0, 1),
        ([1.0, float("inf")], [float("inf"), float("inf")], 1.0, 1.0, 1),
        ([float("nan"), 1.0], [1.0, float("nan")], 9.0, 9.0, 2),
    ],
)
def test_tolerances(a: list[float], b: list[float], rtol: float, atol: float, different: int) -> None:
    found = Comparison(rtol=rtol, atol=atol)
    found.update(torch.tensor(a), torch.tensor(b))
    assert found.different == different
    close = torch.isclose(torch.tensor(a), torch.tensor(b), rtol=rtol, atol=atol)
    assert different == int((~close).sum())


@needs_float4
def test_integers_without_and_with_a_sign() -> None:
    found = Comparison(rtol=0, atol=0)
    found.update(torch.tensor([-1, 5, 2**62]), torch.tensor([2**64 - 1, 5, 2**62 + 1], dtype=torch.uint64))
    assert (found.different, found.max_abs) == (2, 2.0**64)
    found.update(torch.tensor([2**62]), torch.tensor([2**62 + 1], dtype=torch.uint64))
    assert (found.different, found.max_rel) == (3, 1.0)
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = Comparison(rtol=0, atol=0)
    found.update(torch.tensor([2**62]), torch.tensor([2**62 + 1]))
    found.update(packed, torch.tensor([0, 1, 7, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert (found.different, found.max_abs) == (2, 1)


def test_errors(tmp_path: Path) -> None:
    torch.save(some(), tmp_path / "a.pt")
    for wrong in ({"rtol": -1}, {"atol": float("nan")}):
        with pytest.raises(ValueError, match="must not be negative"):
            sluice.diff(tmp_path / "a.pt", tmp_path / "a.pt", **wrong)
    bounds: Any = {"entries": np.int64(99), "symlinks_outside": np.bool_(True)}
    tolerances: Any = {"rtol": np.float32(1), "limits": sluice.Limits(**bounds)}
    assert sluice.diff(tmp_path / "a.pt", tmp_path / "a.pt", **tolerances).same
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "b.pt")
    with pytest.raises(sluice.LimitError, match="repeats its stored elements too often"):
        sluice.diff(tmp_path / "b.pt", tmp_path / "b.pt")


def test_seconds_begin_with_the_call_and_progress_ends_at_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(plain_tensors(), tmp_path / "a.pt")
    watch(monkeypatch, diff, "borrow", lambda *_, **__: time.sleep(0.1))
    seen: list[sluice.ProgressEvent] = []
    report = sluice.diff(tmp_path / "a.pt", tmp_path / "a.pt", progress=seen.append)
    assert report.seconds > 0.2
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.nbytes > 0


CODE = """
import sys, torch, sluice
from sluice.testing import assert_peak
a, b, warm = sys.argv[1:]
sluice.diff(warm, warm)  # imports
with assert_peak((64 + 32) << 20):
    report = sluice.diff(a, b)
assert [one.name for one in report.differences] == ["large"], report
assert report.differences[0].different == 40 << 20
"""


@pytest.mark.usefixtures("fresh_processes")
def test_memory_stays_below_the_gate_for_any_size_of_a_tensor(tmp_path: Path) -> None:
    state = {"large": torch.ones(40 << 20), "transposed": torch.ones(4096, 4096).t()}  # 224 MiB, twice
    sluice.save(state, tmp_path / "a.pt")
    state["large"] += 1
    sluice.save(state, tmp_path / "b.safetensors")
    torch.save({"w": torch.ones(9), "v": torch.zeros(3)}, tmp_path / "warm.pt")
    arguments = [str(tmp_path / name) for name in ("a.pt", "b.safetensors", "warm.pt")]
    done = fresh_process.run(CODE, *arguments)
    for name in arguments:
        Path(name).unlink()
    assert done.returncode == 0, done.stderr
