"""Objects in saved and converted torch files, as ``torch.load(weights_only=True)`` returns them."""

from __future__ import annotations

import io
import pickletools
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sluice
from sluice.records import Entry, elements_of, row_major
from sluice.writing.pickle_walk import elements, walk_object
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import dense, stored
from support.hostile_archives import Call, Global, torch_archive
from support.oracles import same

# The warning of TypedStorage is of torch's own loader.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per", "ignore:Sparse", "ignore:TypedStorage is deprecated"
)


def load(path: Path, *, mmap: bool = False) -> Any:
    return torch.load(path, weights_only=True, mmap=mmap)


def save_and_convert(path: Path, value: object) -> list[Any]:
    """Return the objects that torch reads from a saved value, and from a conversion of torch's own file."""
    sluice.save(value, path / "saved.pt")  # type: ignore[arg-type]
    torch.save(value, path / "torch.pt")
    sluice.convert(path / "torch.pt", path / "converted.pt")
    for name in ("saved.pt", "converted.pt"):
        with zipfile.ZipFile(path / name) as archive:
            pickletools.dis(archive.read("archive/data.pkl"), out=io.StringIO())  # each opcode counts as one
    return [load(path / name, mmap=mmap) for name in ("saved.pt", "converted.pt") for mmap in (False, True)]


def test_plain_values(tmp_path: Path) -> None:
    value = {
        "numbers": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 1 << 2038, -(1 << 2039)],
        "floats": [0.0, -0.0, 1.5, float("inf"), float("nan"), 1 - 2j],
        "texts": ["", "a", "é\0\n", "x" * 70_000],
        "bytes": [b"", b"\0\xff", bytes(range(256)), b"z" * 70_000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "dicts": [{}, {1: 2}, OrderedDict(), OrderedDict(a=1), Counter("aab"), dict.fromkeys(range(2500), None)],
        "lists": [[], [[]], list(range(2500))],
        "sets": [set(), {1, "a", None}],
        "flags": (None, True, False),
        (1, "two"): b"key",
    }
    for found in save_and_convert(tmp_path, value):
        assert same(found, value)


def test_values_of_torch(tmp_path: Path) -> None:
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    if torch.__version__.startswith("2.6."):  # its torch.load refuses some of its own dtypes
        dtypes &= set(torch._weights_only_unpickler._get_allowed_globals().values())
    layouts = {one for one in vars(torch).values() if isinstance(one, torch.layout)}
    value: dict[Any, Any] = {
        "dtypes": sorted(dtypes, key=str),
        "layouts": sorted(layouts, key=str),
        "schemes": [torch.per_tensor_affine, torch.per_channel_affine_float_qparams],
        "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "sizes": (torch.Size([]), torch.Size([2, 3])),
        "set": {torch.float32, "float32", torch.device("cpu")},
        torch.float16: "a key",
    }
    for found in save_and_convert(tmp_path, value):
        assert same(found, value)
    ours = sluice.load_state_dict(tmp_path / "torch.pt", key="")
    assert same(dict(ours), value)
    sluice.save(ours, tmp_path / "again.pt")
    assert same(load(tmp_path / "again.pt"), value)
    with sluice.open(tmp_path / "torch.pt") as checkpoint:
        assert checkpoint.tree["dtypes"] == [str(one) for one in value["dtypes"]]
        assert checkpoint.tree["sizes"] == ((), (2, 3))
        sluice.save(checkpoint.tree, tmp_path / "tree.pt")
    assert same(load(tmp_path / "tree.pt"), value)


def test_no_text_of_a_file_becomes_a_name_that_torch_resolves(tmp_path: Path) -> None:
    hostile = Call(Global("torch.serialization", "_get_layout"), ("torch.load\nNuke",))
    (tmp_path / "in.pt").write_bytes(torch_archive({"a": hostile}))
    sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt")
    assert b"ctorch\nload" not in (tmp_path / "out.pt").read_bytes()
    assert sluice.load_state_dict(tmp_path / "out.pt", key="") == {"a": "torch.load\nNuke"}


@pytest.mark.parametrize("value", ["\ud800", bytearray(b"\0\xff"), bytearray()])
def test_values_that_torch_does_not_save(tmp_path: Path, value: object) -> None:
    sluice.save({"a": value}, tmp_path / "f.pt")
    assert load(tmp_path / "f.pt") == {"a": value}


def test_what_cannot_be_saved_is_located(tmp_path: Path) -> None:
    tensors: list[object] = [torch.ones(1)]
    tensors.append(tensors)
    values: list[Any] = [np.float64(1), defaultdict(list), torch.ones(1).to_sparse()]
    for value in values:
        with pytest.raises(sluice.SaveError) as caught:
            sluice.save({"a": tensors, "metrics": {"loss": [1.0, value], 3: value}}, tmp_path / "f.pt")
        assert caught.value.tensor in {"metrics.loss.1", "metrics.3"}
    with pytest.raises(sluice.SaveError, match=r"tensor 'metrics\.loss'"):
        sluice.save({"metrics": {"loss": np.float64(1)}}, tmp_path / "d", format="dcp")
    with pytest.raises(sluice.SaveError, match=r"^only .*float64\. Put float\(x\)"):
        sluice.save({"set": {np.float64(1)}}, tmp_path / "f.pt")


def test_what_stands_at_several_places_is_one_object_again(tmp_path: Path) -> None:
    tensor, text, values = torch.ones(2), "long text", [1, 2]
    pair, raw = (values, text), b"raw"
    value = {"a": tensor, "b": [tensor, text, text], "c": values, "d": values, "e": pair, "f": pair, "g": raw, "h": raw}
    for found in save_and_convert(tmp_path, value):
        assert found["a"] is found["b"][0]
        assert found["b"][1] is found["b"][2] is found["e"][1]
        assert found["c"] is found["d"] is found["e"][0]
        assert found["e"] is found["f"]
        assert found["g"] is found["h"]


def test_elements_of_a_set_have_an_order_of_their_own() -> None:
    assert elements({"b", "a", 3, 2}) == [2, 3, "a", "b"]


def test_a_text_that_stands_at_several_places_is_written_once(tmp_path: Path) -> None:
    sluice.save({str(i): {"exponential average": 1.0} for i in range(50)}, tmp_path / "f.pt")
    assert (tmp_path / "f.pt").read_bytes().count(b"exponential average") == 1


def test_cycles(tmp_path: Path) -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    sluice.save(cycle, tmp_path / "f.pt")  # type: ignore[arg-type]
    found = load(tmp_path / "f.pt")
    assert found[1]["again"] is found
    inside: list[Any] = []
    inside.append((inside,))
    tensor = torch.ones(1)
    tensor.me = tensor  # type: ignore[attr-defined]
    for each in (inside[0], tensor):
        with pytest.raises(sluice.SaveError, match="contains itself"):
            sluice.save({"a": each}, tmp_path / "g.pt")
    assert not (tmp_path / "g.pt").exists()


def test_depth_costs_no_stack(tmp_path: Path) -> None:
    deep: list[Any] = [torch.ones(1)]
    for _ in range(5000):
        deep = [deep]
    sluice.save({"deep": deep}, tmp_path / "f.pt")
    found = load(tmp_path / "f.pt")["deep"]
    for _ in range(5000):
        (found,) = found
    assert torch.equal(found[0], torch.ones(1))


def test_sparse_and_quantized_tensors_are_refused_with_advice(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    for tensor in (torch.eye(3).to_sparse(), quantized):
        torch.save({"a": tensor}, tmp_path / "in.pt")
        for name in ("o.pt", "o.safetensors"):
            with pytest.raises(sluice.SaveError, match=r"tensor cannot be written.*with torch\.save"):
                sluice.save({"a": tensor}, tmp_path / name)
            with pytest.raises(sluice.UnsupportedError, match=r"tensor cannot be written.*key= or rules\.drop"):
                sluice.convert(tmp_path / "in.pt", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_python_attributes_are_kept(tmp_path: Path) -> None:
    inner = torch.arange(3.0)
    tagged, frozen = torch.randn(4), nn.Parameter(torch.randn(2), requires_grad=False)
    tagged.tag = {"rank": 3, "like": inner}  # type: ignore[attr-defined]
    frozen.sequence_parallel = True  # type: ignore[attr-defined]
    for found in save_and_convert(tmp_path, {"a": tagged, "b": frozen, "c": inner}):
        assert found["a"].tag["rank"] == 3
        assert found["a"].tag["like"] is found["c"]
        assert found["b"].sequence_parallel is True
        assert type(found["b"]) is nn.Parameter
    frozen.loader = print  # type: ignore[attr-defined]
    with pytest.raises(sluice.SaveError, match="found print"):
        sluice.save({"b": frozen}, tmp_path / "f.pt")
    sluice.save({"b": frozen}, tmp_path / "f.safetensors")  # which has no field for attributes


def test_a_pickle_takes_little_memory_for_each_tensor() -> None:
    floats = elements_of("float32")
    tree = {
        f"blocks.{i}.weight": Entry(elements=floats, shape=(i,), stride=(1,), storage=i, storage_offset=0)
        for i in range(5000)
    }

    def look(value: object) -> dict[str, object] | None:
        if isinstance(value, Entry):
            return {}
        assert is_plain(value), refusal(value)
        return None

    tracemalloc.start()
    try:
        walked = walk_object(tree, look)
        views = (row_major("float32", (i,), i) for i in range(len(walked.tensors)))
        described = (dense(view, stored(view, view.numel)) for view in views)
        pickled = pickle_object(tree, walked, described)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 250 * len(tree)  # Python's pickler needs 900
    assert len(pickled) < 90 * len(tree)
