"""Sparse and quantized tensors: equal to ``torch.load``, and never with indices out of bounds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import FormatError, MismatchError, UnsupportedError
from sluice._dtypes import ITEM_BYTES, torch_dtype
from support.directories import save_sharded
from support.hostile_archives import Call, Global, storage, torch_archive
from support.oracles import same
from support.torch_files import compressed, coo

# The warning of TypedStorage is of torch's own loader.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per", "ignore:Sparse", "ignore:TypedStorage is deprecated", "ignore:ComplexHalf support"
)

FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def check(path: Path, value: dict[str, Any], **how: Any) -> dict[str, Any]:
    torch.save(value, path, **how)
    with torch.device("meta"):  # the default device of torch, which loads do not use
        ours = sluice.load_state_dict(path)
    assert same(dict(ours), torch.load(path, weights_only=True, mmap=False))
    with sluice.open(path) as checkpoint:
        for name, tensor in checkpoint.items():
            if tensor.entry.composite is not None:
                one = tensor.read()
                assert (one.layout, one.dtype, tuple(one.shape)) == (ours[name].layout, tensor.dtype, tensor.shape)
                assert one.is_quantized == ours[name].is_quantized
    return ours


def dense(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    values = (torch.rand(6, 8) * 100 - 30) * (torch.rand(6, 8) > 0.6)
    return values.to(dtype)


@FORMS
def test_sparse_layouts(tmp_path: Path, zipped: bool) -> None:
    d = dense()
    uncoalesced = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    batch = torch.stack([d, d])
    parameter = torch.nn.Parameter(d.to_sparse())
    value = {
        "coo": d.to_sparse(),
        "hybrid": d.to_sparse(1),
        "uncoalesced": uncoalesced,
        "empty coo": torch.zeros(3, 4).to_sparse(),
        "no dimensions": torch.tensor(3.0).to_sparse(),
        "csr": d.to_sparse_csr(),
        "gradient": d.to_sparse_csr().requires_grad_(),
        "csc": d.to_sparse_csc(),
        "bsr": d.to_sparse_bsr((2, 4)),
        "bsc": d.to_sparse_bsc((3, 2)),
        "empty csr": torch.zeros(3, 4).to_sparse_csr(),
        "batch": batch.to_sparse_csr(),
        "batch of blocks": batch.to_sparse_bsr((2, 4)),
        "dense behind": torch.stack([d, d], 2).to_sparse_csr(dense_dim=1),
        "int32": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.ones(2), (2, 2)
        ),
        "parameter": parameter,
        "tied": parameter,
        "dense": d,
    }
    ours = check(tmp_path / "f.pth", value, _use_new_zipfile_serialization=zipped)
    assert ours["parameter"] is ours["tied"]
    assert ours["coo"].is_coalesced()
    assert not ours["uncoalesced"].is_coalesced()


@pytest.mark.parametrize("name", [name for name in ITEM_BYTES if not name.startswith(("float8", "float4", "uint"))])
def test_sparse_tensors_of_every_dtype(tmp_path: Path, name: str) -> None:
    indices = torch.tensor([[0, 2, 3], [1, 0, 1]])
    values = torch.arange(3).to(torch_dtype(name))
    check(tmp_path / "f.pth", {"w": torch.sparse_coo_tensor(indices, values, (4, 2))})


@FORMS
def test_quantized_tensors(tmp_path: Path, zipped: bool) -> None:
    d = dense() / 40
    scales, points = torch.rand(6, dtype=torch.double) + 0.1, torch.arange(6)
    whole = torch.quantize_per_tensor(d, 0.1, 3, torch.qint8)
    value = {
        **{str(q): torch.quantize_per_tensor(d, 0.1, 3, q) for q in (torch.qint8, torch.quint8, torch.qint32)},
        **{f"{q} channels": torch.quantize_per_channel(d, scales, points, 0, q) for q in (torch.qint8, torch.quint8)},
        "axis 1": torch.quantize_per_channel(d.t(), scales, points, 1, torch.qint8),
        "one dimension": torch.quantize_per_channel(d[:, 0].contiguous(), scales, points, 0, torch.qint8),
        "float": torch.quantize_per_channel(d, scales.float(), points.float(), 0, torch.quint8),
        "transposed": whole.t(),
        "whole": whole,
        "rows": whole[2:4],
        "scalar": torch.quantize_per_tensor(torch.tensor(2.0), 0.5, 0, torch.qint8),
    }
    ours = check(tmp_path / "f.pth", value, _use_new_zipfile_serialization=zipped)
    assert ours["rows"].untyped_storage().data_ptr() == ours["whole"].untyped_storage().data_ptr()


def test_a_large_quantized_tensor_is_read_in_place(tmp_path: Path) -> None:
    value = torch.quantize_per_tensor(torch.randn(1500, 1000), 0.05, 0, torch.qint8)
    ours = check(tmp_path / "f.pth", {"w": value})
    assert ours["w"].untyped_storage().nbytes() == 1_500_000


def test_scales_in_lists() -> None:
    for kind, points in (("per_channel_affine", [1, 2, 3]), ("per_channel_affine_float_qparams", [1.0, 2.0, 3.0])):
        parameters = (Global("torch", kind), [0.5, 0.25, 2.0], points, 0)
        hooks = Call(Global("collections", "OrderedDict"))
        arguments = (storage("0", 6, kind="QInt8Storage"), 0, (3, 2), (2, 1), parameters, False, hooks)
        content = torch_archive({"w": Call(Global("torch._utils", "_rebuild_qtensor"), arguments)}, {"0": b"abcdef"})
        expected = torch.load(io.BytesIO(content), weights_only=True)
        assert same(dict(sluice.load_state_dict(io.BytesIO(content))), expected)


def test_casting_changes_the_values_of_sparse_tensors_only(tmp_path: Path) -> None:
    d = dense()
    value = {
        "coo": d.to_sparse(),
        "csr": d.to_sparse_csr(),
        "ints": d.int().to_sparse(),
        "q": torch.quantize_per_channel(d, torch.ones(6, dtype=torch.double), torch.arange(6), 0, torch.qint8),
    }
    torch.save(value, tmp_path / "f.pth")
    ours = sluice.load_state_dict(tmp_path / "f.pth", dtype=torch.bfloat16)
    expected = {"coo": value["coo"].bfloat16(), "csr": value["csr"].bfloat16(), "ints": value["ints"], "q": value["q"]}
    assert same(dict(ours), expected)
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        assert same(checkpoint["csr"].read(dtype=torch.float16), value["csr"].half())
        with pytest.raises(MismatchError, match="quantized"):
            checkpoint["q"].read(dtype=torch.float32)
        with pytest.raises(MismatchError, match="sparse_csr tensor is not read into another"):
            checkpoint["csr"].read(out=torch.empty(6, 8))
        with pytest.raises(UnsupportedError, match="read whole"):
            checkpoint["coo"][0]


def test_a_module_takes_only_dense_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 6, bias=False)
    before = model.weight.detach().clone()
    for value in (dense().to_sparse_csr(), torch.quantize_per_tensor(dense(), 1.0, 0, torch.qint8)):
        torch.save({"weight": value}, tmp_path / "f.pth")
        layout = "quantized" if value.is_quantized else "sparse_csr"
        with pytest.raises(MismatchError, match=f"'weight' is a {layout} tensor in the checkpoint"):
            sluice.load_into(model, tmp_path / "f.pth")
        model.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    assert torch.equal(model.weight, before)


def test_shards(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.main = torch.arange(5)  # type: ignore[attr-defined]
    channels = torch.quantize_per_channel(dense(), torch.ones(6, dtype=torch.double), torch.arange(6), 0, torch.qint8)
    parts: list[dict[str, Any]] = [
        {"a": torch.ones(4)},
        {"csr": dense().to_sparse_csr(), "q": channels, "p": parameter},
    ]
    files = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    save_sharded(tmp_path, "pytorch_model.bin.index.json", dict(zip(files, parts, strict=True)))
    assert same(dict(sluice.load_state_dict(tmp_path)), parts[0] | parts[1])


def test_rules_keep_or_refuse_them(tmp_path: Path) -> None:
    value = {"a": dense().to_sparse_csr(), "q": torch.quantize_per_tensor(dense(), 1.0, 0, torch.qint8)}
    torch.save(value, tmp_path / "f.pth")
    renamed = sluice.load_state_dict(tmp_path / "f.pth", rules=[sluice.rules.rename("a", "b"), sluice.rules.drop("q")])
    assert same(dict(renamed), {"b": value["a"]})
    for rule in (
        sluice.rules.transpose("a"),
        sluice.rules.cast("q", torch.float32),
        sluice.rules.split("a", ["b", "c"]),
        sluice.rules.concatenate(["a", "q"], "b"),
    ):
        with pytest.raises(MismatchError, match="tensor: rules can change only dense tensors"):
            sluice.load_state_dict(tmp_path / "f.pth", rules=[rule])


# Invalid data


def refused(content: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        sluice.load_state_dict(io.BytesIO(content))
    assert caught.value.tensor == "w"
    with sluice.open(io.BytesIO(content)) as checkpoint, pytest.raises(FormatError, match=problem):
        checkpoint["w"].read()


@pytest.mark.parametrize("bad", [-1, 4, 2**62, -(2**63), 2**63 - 1])
def test_coo_indices_outside_the_tensor(bad: int) -> None:
    sluice.load_state_dict(io.BytesIO(coo([[0, 3], [0, 4]], (4, 5))))
    refused(coo([[0, bad], [0, 4]], (4, 5)), "index of dimension 0 of a sparse tensor is out of range")
    refused(coo([[0, 3], [bad + 1 if bad == 4 else bad, 4]], (4, 5)), "index of dimension 1")
    refused(coo([[0], [0]], (4, 0)), "is out of range")


@pytest.mark.parametrize("indices", [[[1, 0], [0, 0]], [[1, 1], [2, 2]], [[0, 0], [3, 2]]])
def test_coalesced_tensors_that_are_not(indices: list[list[int]]) -> None:
    assert not sluice.load_state_dict(io.BytesIO(coo(indices, (4, 5))))["w"].is_coalesced()
    refused(coo(indices, (4, 5), coalesced=True), "not sorted or not distinct")


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_indices_that_lie(layout: str) -> None:
    def refuse(lines: list[int], plain: list[int], problem: str, shape: tuple[int, int] = (3, 4)) -> None:
        shape = shape if layout.endswith("r") else (shape[1], shape[0])
        refused(compressed(layout, lines, plain, shape), problem)

    good = compressed(layout, [0, 1, 1, 3], [2, 0, 3], (3, 4) if layout.endswith("r") else (4, 3))
    expected = torch.load(io.BytesIO(good), weights_only=True)
    assert same(dict(sluice.load_state_dict(io.BytesIO(good))), expected)
    refuse([1, 1, 1, 3], [2, 0, 3], "do not run from 0")
    refuse([0, 1, 1, 2], [2, 0, 3], "do not run from 0")
    refuse([0, 1, 1, 4], [2, 0, 3], "do not run from 0")
    refuse([0, 2, 1, 3], [2, 3, 3], "not sorted")
    refuse([0, -1, 1, 3], [2, 0, 3], "not sorted")
    refuse([0, 2**40, 1, 3], [2, 0, 3], "not sorted", (3, 2**50))  # torch would access memory out of bounds
    refuse([0, 1, 1, 3], [2, 0, 4], "plain index of a sparse tensor is out of range")
    refuse([0, 1, 1, 3], [-1, 0, 3], "plain index of a sparse tensor is out of range")
    refuse([0, 1, 1, 3], [2, 3, 0], "plain indices of a sparse tensor are not sorted in a row")
    refuse([0, 1, 1, 3], [2, 3, 3], "plain indices of a sparse tensor are not sorted in a row")
