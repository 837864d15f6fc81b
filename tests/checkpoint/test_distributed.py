"""torch.distributed.checkpoint directories, written by torch and by hand, compared with torch's reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties

import sluice
from sluice.entries.slicing import first_miscount
from sluice.formats.distributed.items import ItemReader
from support.distributed import Box, StoredChunk, StoredTensor, chunks, everything, rows, save, torch_loaded, write
from support.oracles import same
from support.quantized import Scaled, parts_in
from support.ranks import Ranks
from support.sources import record_reads
from support.watching import watch


def check(directory: Path) -> None:
    with sluice.open(directory) as checkpoint:
        assert checkpoint.format == "torch-distributed"
        assert same(everything(checkpoint), torch_loaded(directory))


def train_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out of its types
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "epoch": 3,
        "name": "run",
        "none": None,
        "losses": [0.5, float("inf")],
        "nested": [torch.arange(3), {"a": [torch.ones(2, dtype=torch.bfloat16), {}], "b": 2.5}],
        "pair": (torch.arange(4.0), "text"),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "transposed": torch.randn(4, 5).t(),
        "view": torch.randn(10, 10)[2:5, 3:6],
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([[True, False]]),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "uint16": torch.arange(4).to(torch.uint16),
    }


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_what_torch_saves_in_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    check(save(tmp_path / "d", train_state(), **options))


def test_state_dicts_that_were_saved_without_flattening(tmp_path: Path) -> None:
    """Return objects that are one value each and contain tensors with shared storages."""
    weight = torch.randn(2, 3)
    state = {"model": {"a": weight, "deep": {"b": weight[0]}, "n": 3}, "other": torch.arange(3.0)}
    save(tmp_path / "d", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    check(tmp_path / "d")
    with sluice.open(tmp_path / "d") as checkpoint:
        assert torch.equal(checkpoint["model.a"][1, 1:].read(), weight[1, 1:])
        assert checkpoint["model.a"].storage_key == checkpoint["model.deep.b"].storage_key == "model/0"
    loaded = sluice.load_state_dict(tmp_path / "d", key="model")
    assert loaded["a"].data_ptr() == loaded["deep"]["b"].data_ptr()


def test_names_stay_flat_without_paths(tmp_path: Path) -> None:
    write(tmp_path / "d", {"a.b": rows(torch.arange(6.0), 2)}, {"n.step": 4})
    check(tmp_path / "d")
    with sluice.open(tmp_path / "d") as checkpoint:
        assert list(checkpoint.tree) == ["n.step", "a.b"]


def test_the_metadata_stands_for_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"w": rows(torch.arange(6.0), 2)})
    (tmp_path / "model.safetensors").touch()  # would be first
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / ".metadata", Path(".metadata")):
        with sluice.open(path) as checkpoint:
            assert torch.equal(checkpoint["w"].read(), torch.arange(6.0))


def test_positions_that_no_item_has_are_none(tmp_path: Path) -> None:
    write(tmp_path / "d", {}, {"l.2": 1, "l.0.x": 2}, paths={"l.2": ("l", 2), "l.0.x": ("l", 0, "x")})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert checkpoint.tree == {"l": [{"x": 2}, None, 1]}


def test_chunks_become_one_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(8, 6)
    write(tmp_path / "d", {"w": rows(tensor, 4, files=2), "one": rows(tensor, 1)})
    check(tmp_path / "d")
    with sluice.open(tmp_path / "d") as checkpoint:
        assert checkpoint.files == (str(tmp_path / "d/__0_0.distcp"), str(tmp_path / "d/__1_0.distcp"))
        assert checkpoint["one"].entry.parts == ()
        assert len(checkpoint["w"].entry.parts) == 4
        assert checkpoint["w"].storage_key == "w[0, 0]+w[2, 0]+w[4, 0]+w[6, 0]"
        assert checkpoint.index.notes == ("Tensors that are assembled from chunks: 1, of 4 chunks.",)
        assert torch.equal(checkpoint["w"][1:7:2, 1].read(), tensor[1:7:2, 1])
        assert torch.equal(checkpoint["w"].read(dtype=torch.float16), tensor.half())


def test_chunks_without_elements_are_passed_over(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    boxes: list[Box] = [((0, 0), (1, 3)), ((1, 0), (1, 3)), ((2, 0), (0, 3)), ((2, 0), (0, 3))]
    empty = chunks(torch.empty(0, 2), [((0, 0), (0, 2))])
    write(tmp_path / "d", {"w": chunks(tensor, boxes, files=4), "none": empty})
    check(tmp_path / "d")
    with sluice.open(tmp_path / "d") as checkpoint:
        assert checkpoint.index.notes == ("Tensors that are assembled from chunks: 1, of 2 chunks.",)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw boxes that result from cutting boxes in two: more general than grids."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        start, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for first, size in ((0, at), (at, sizes[dim] - at)):
            moved = (*start[:dim], start[dim] + first, *start[dim + 1 :])
            if size:
                boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=30)
@given(made=partitions(), dtype=st.sampled_from([torch.int64, torch.bfloat16]), files=st.integers(1, 3))
def test_any_boxes_of_chunks_equal_torchs(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype, files: int
) -> None:
    shape, boxes = made
    tensor = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape[::-1])
    tensor = tensor.permute(list(reversed(range(len(shape)))))
    directory = tmp_path_factory.mktemp("boxes") / "d"
    write(directory, {"w": chunks(tensor, boxes, files=files)})
    check(directory)
    with sluice.open(directory) as checkpoint:
        assert same(checkpoint["w"].read(), tensor)


def test_a_slice_reads_only_the_chunks_that_it_touches(tmp_path: Path) -> None:
    tensor = torch.randn(64, 1 << 14)
    write(tmp_path / "d", {"w": rows(tensor, 8, files=2)})
    with sluice.open(tmp_path / "d") as checkpoint:
        recorded = record_reads(checkpoint)
        assert torch.equal(checkpoint["w"][20:22].read(), tensor[20:22])
        assert recorded[1].reads == []
        assert recorded[0].read_bytes < 2 * 4 * (1 << 14) + 3 * 4096
        assert torch.equal(checkpoint["w"][25].read(), tensor[25])
        assert recorded[1].read_bytes < 4 * (1 << 14) + 3 * 4096


def test_chunks_of_one_kind_are_parsed_once_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    watch(monkeypatch, ItemReader, "parse", lambda *given: parsed.append(given[2].name))
    write(tmp_path / "d", {"a": rows(torch.randn(40, 3), 20), "b": rows(torch.randn(40, 3), 20)})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert parsed == ["a[0, 0]"]
        checkpoint["a"][2:4].read()
    assert parsed == ["a[0, 0]", "a[2, 0]"]


def save_on_ranks(directory: str) -> None:
    """Save tensors that four ranks hold parts of, and on the first rank the whole ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    shapes = {"grid": (10, 6), "uneven": (7, 3), "few": (2, 5), "copies": (4,), "hybrid": (6, 4)}
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    model = {
        "grid": distribute_tensor(full["grid"], grid, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(full["uneven"], line, [Shard(0)]),
        "few": distribute_tensor(full["few"], line, [Shard(0)]),
        "copies": distribute_tensor(full["copies"], line, [Replicate()]),
        "hybrid": distribute_tensor(full["hybrid"], grid, [Replicate(), Shard(0)]),
    }
    state_dict_saver.save({"model": model, "step": 7}, checkpoint_id=directory)
    if torch.distributed.get_rank() == 0:
        torch.save(full, f"{directory}.pth")


def test_what_four_ranks_save(tmp_path: Path, four_ranks: Ranks) -> None:
    four_ranks.run(save_on_ranks, str(tmp_path / "d"))
    check(tmp_path / "d")
    full = torch.load(tmp_path / "d.pth")
    assert same(dict(sluice.load_state_dict(tmp_path / "d", key="model")), full)
    with sluice.open(tmp_path / "d") as checkpoint:
        assert checkpoint.index.notes == ("Tensors that are assembled from chunks: 4, of 12 chunks.",)
        assert torch.equal(checkpoint["model.grid"][3:8, 2:].read(), full["grid"][3:8, 2:])


def test_equal_values_stay_apart(tmp_path: Path) -> None:
    write(tmp_path / "d", {}, {"a": [1, 2], "b": [1, 2]})
    with sluice.open(tmp_path / "d") as checkpoint:
        assert checkpoint.tree == {"a": [1, 2], "b": [1, 2]}
        assert checkpoint.tree["a"] is not checkpoint.tree["b"]


@given(made=partitions(), data=st.data())
def test_the_first_element_that_is_not_covered_once(
    made: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = made
    assert first_miscount(shape, boxes) is None
    wrong = list(boxes)
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()) and wrong:
            wrong.pop(data.draw(st.integers(0, len(wrong) - 1)))
        else:
            start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            ends = tuple(data.draw(st.integers(first + 1, size)) for first, size in zip(start, shape, strict=True))
            wrong.append((start, tuple(end - first for first, end in zip(start, ends, strict=True))))
    counts = torch.zeros(shape, dtype=torch.int64)
    for start, sizes in wrong:
        counts[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))] += 1
    found = first_miscount(shape, wrong)
    if found is None:
        assert bool((counts == 1).all())
    else:
        assert tuple((counts != 1).nonzero()[0].tolist()) == found[0]
        assert counts[found[0]] == found[1]


def test_a_pinwheel_covers_without_a_cut_through_all(tmp_path: Path) -> None:
    boxes: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    write(tmp_path / "d", {"w": chunks(torch.arange(9.0).view(3, 3), boxes)})
    check(tmp_path / "d")


def test_large_grids_are_checked_in_one_pass() -> None:
    boxes: list[Box] = [((i, j), (1, 2)) for i in range(150) for j in range(0, 300, 2)]
    assert first_miscount((150, 300), boxes) is None
    assert first_miscount((150, 300), [box for box in boxes if box[0] != (77, 12)]) == ((77, 12), 0)


def test_conjugates_and_negatives(tmp_path: Path) -> None:
    """torch saves such tensors as views, and copies them when it loads."""
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    save(tmp_path / "d", {"whole": numbers.clone().conj(), "negative": numbers.clone().conj().imag})
    with sluice.open(tmp_path / "d") as checkpoint:
        ours = sluice.load_state_dict(checkpoint)
        assert same(dict(ours), torch_loaded(tmp_path / "d"))
        assert not ours["whole"].is_conj()
        assert torch.equal(checkpoint["whole"][1:3].read(), numbers.conj()[1:3])


@pytest.mark.parametrize("later", [((3, 1),), (None,), (None, "unknown")], ids=["strides", "no strides", "unknown"])
def test_properties_that_later_versions_of_torch_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: tuple[object, ...]
) -> None:
    def state(self: TensorProperties) -> tuple[object, ...]:
        return (*earlier(self)[:5], *later)

    earlier: Any = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", state)
    save(tmp_path / "d", {"w": torch.arange(6.0).view(2, 3)})
    with sluice.open(tmp_path / "d") as checkpoint:
        if len(later) == 1:  # as from torch 2.15 on
            assert torch.equal(checkpoint["w"].read(), torch.arange(6.0).view(2, 3))
        else:
            assert "a tensor with 7 properties, of which sluice knows 6" in repr(checkpoint.tree["w"])


def test_tensors_that_wrap_others(tmp_path: Path) -> None:
    """Those in values keep their bytes; those of tensor items are not offered with storages of other items."""
    integers, scale = torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2, 1)
    wrapped, data = Scaled(integers, scale, torch.float32), io.BytesIO()
    torch.save(wrapped, data)
    stored = StoredTensor(shape=(2, 3), chunks=[StoredChunk(start=(0, 0), shape=(2, 3), item=data.getvalue())])
    with sluice.open(write(tmp_path / "d", {"w": stored}, {"a": [torch.zeros(9)], "q": {"w": wrapped}})) as checkpoint:
        found = parts_in(checkpoint, "q", "w")
        assert torch.equal(found["integers"], integers)
        assert torch.equal(found["scale"], scale)
        tree: Any = checkpoint.index.tree
        assert tree["w"].inner is None
