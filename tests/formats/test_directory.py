"""Directories and shard indexes: what is chosen, what is merged, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice.formats import _directory, _opening

Tensors = dict[str, torch.Tensor]

SAFETENSORS_INDEX = "model.safetensors.index.json"


def tensors(*names: str) -> Tensors:
    return {name: torch.arange(12.0).reshape(3, 4) + 100 * number for number, name in enumerate(names)}


def save(path: Path, content: Any) -> None:
    """Write a file in the format that its name promises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path, metadata={"format": "pt"})
    else:
        torch.save(content, path)


def read_with_their_library(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return dict(torch.load(path, weights_only=True))


def write_index(path: Path, shards: Mapping[str, Iterable[str]], **metadata: object) -> Path:
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2))
    return path


def save_sharded(directory: Path, index: str, shards: Mapping[str, Tensors]) -> Path:
    """Write shards and their index; return the index."""
    for name, content in shards.items():
        save(directory / name, content)
    total = sum(tensor.nbytes for content in shards.values() for tensor in content.values())
    return write_index(directory / index, shards, total_size=total)


def two_shards(directory: Path, suffix: str = ".safetensors") -> tuple[Path, Path]:
    """Write a small sharded model; return its shards."""
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    names = (f"{stem}-00001-of-00002{suffix}", f"{stem}-00002-of-00002{suffix}")
    shards = dict(zip(names, (tensors("a.w", "a.b"), tensors("c", "b.w")), strict=True))
    save_sharded(directory, f"{stem}{suffix}.index.json", shards)
    return directory / names[0], directory / names[1]


def assert_same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def notes(source: Path) -> str:
    with sluice.open(source) as checkpoint:
        return "\n".join(checkpoint.index.notes)


def chosen(directory: Path) -> list[str]:
    with sluice.open(directory) as checkpoint:
        return [os.path.relpath(file, directory) for file in checkpoint.files]


def refusal(source: Path, limits: sluice.Limits | None = None) -> sluice.SluiceError:
    with pytest.raises(sluice.SluiceError) as caught:
        sluice.open(source, limits=limits)
    return caught.value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 2)


def empty() -> Net:
    with sluice.empty_init():
        return Net()


# What is read


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("by_index", [False, True], ids=["directory", "index file"])
def test_shards_read_as_their_library_reads_them(tmp_path: Path, suffix: str, by_index: bool) -> None:
    shards = two_shards(tmp_path, suffix)
    expected = {name: tensor for shard in shards for name, tensor in read_with_their_library(shard).items()}
    source = next(tmp_path.glob("*.json")) if by_index else tmp_path
    assert_same(sluice.load_state_dict(source), expected)
    with sluice.open(source) as checkpoint:
        assert checkpoint.format == {".safetensors": "huggingface-safetensors", ".bin": "huggingface-bin"}[suffix]
        assert checkpoint.files == tuple(map(str, shards))
        assert checkpoint.path == str(source)
        assert checkpoint.index.notes == ()
        assert checkpoint.nbytes == 4 * 48
        assert list(checkpoint) == list(expected)
        assert torch.equal(checkpoint["b.w"][1:, 2].read(), expected["b.w"][1:, 2])
        assert checkpoint.tree["c"].storage_key == checkpoint["c"].storage_key
        if suffix == ".safetensors":
            assert checkpoint.metadata == {"format": "pt"}
        else:
            assert checkpoint.metadata["byteorder"] == "little"


def save_whole(directory: Path, content: Tensors, suffix: str) -> None:
    save(directory / {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}[suffix], content)


def save_in_two(directory: Path, content: Tensors, suffix: str) -> None:
    items = list(content.items())
    save_sharded(directory, f"model{suffix}.index.json", {f"1{suffix}": dict(items[:4]), f"2{suffix}": dict(items[4:])})


def save_one_by_one(directory: Path, content: Tensors, suffix: str) -> None:
    for name, tensor in content.items():
        save(directory / f"{name}{suffix}", tensor if suffix == ".pt" else {name: tensor})


@pytest.mark.parametrize(
    ("write", "suffix"),
    [
        (save_whole, ".safetensors"),
        (save_whole, ".bin"),
        (save_in_two, ".safetensors"),
        (save_in_two, ".bin"),
        (save_one_by_one, ".pt"),
        (save_one_by_one, ".safetensors"),
    ],
)
def test_every_kind_fills_a_module(tmp_path: Path, write: Callable[[Path, Tensors, str], None], suffix: str) -> None:
    torch.manual_seed(0)
    saved = Net().state_dict()
    write(tmp_path, saved, suffix)
    model = empty()
    report = sluice.load_into(model, tmp_path)
    assert_same(model.state_dict(), saved)
    assert report.source == str(tmp_path)
    assert report.final_bytes == sum(tensor.nbytes for tensor in saved.values())
    assert_same(sluice.load_state_dict(tmp_path), saved)
    live = Net()
    sluice.load_into(live, tmp_path)
    assert_same(live.state_dict(), saved)
    with sluice.open(tmp_path, key="first") as part:
        assert set(part) == {"weight", "bias"}
        assert torch.equal(part["weight"].read(), saved["first.weight"])


def test_views_and_parameters_of_pickled_shards_stay_what_they_are(tmp_path: Path) -> None:
    base = torch.arange(20.0)
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    save(tmp_path / "1.bin", {"u": torch.zeros(2)})
    save(tmp_path / "2.bin", {"x": base[2:], "y": base[:4], "w": weight, "tied": weight})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["u"], "2.bin": ["x", "y", "w", "tied"]})
    state_dict = sluice.load_state_dict(tmp_path)
    assert state_dict["x"].data_ptr() == state_dict["y"].data_ptr() + 8
    assert state_dict["tied"] is state_dict["w"]
    assert isinstance(state_dict["w"], nn.Parameter)
    assert torch.equal(state_dict["x"], base[2:])


def test_other_values_and_versions_of_pickled_shards_are_kept(tmp_path: Path) -> None:
    state_dict = Net().state_dict()
    first = OrderedDict((name, state_dict[name]) for name in list(state_dict)[:3])
    first._metadata = state_dict._metadata  # type: ignore[attr-defined]
    deep = torch.ones(2)
    rest = {"deep": [deep, {"same": deep}], "step": 3, **{name: state_dict[name] for name in list(state_dict)[3:]}}
    save(tmp_path / "1.bin", first)
    save(tmp_path / "2.bin", rest)
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": first, "2.bin": rest})
    found = sluice.load_state_dict(tmp_path)
    assert found._metadata == state_dict._metadata  # type: ignore[attr-defined]
    assert found["step"] == 3
    assert found["deep"][0] is found["deep"][1]["same"]
    assert torch.equal(found["deep"][0], deep)


def test_a_single_file_keeps_its_nesting(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model.bin", {"model": tensors("w"), "epoch": 3})
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "huggingface-bin"
        assert checkpoint.tree["epoch"] == 3
        assert list(checkpoint) == ["model.w"]


def test_legacy_names_and_dots_become_names_of_parameters(tmp_path: Path) -> None:
    expected = tensors("blocks.0.weight", "scale", "odd name.pt")
    for name, tensor in expected.items():
        save(tmp_path / f"{name}.pt", nn.Parameter(tensor))
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "per-parameter"
        assert {name: tensor.read().tolist() for name, tensor in checkpoint.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
    assert isinstance(sluice.load_state_dict(tmp_path)["scale"], nn.Parameter)


def test_only_the_shard_that_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_shards(tmp_path)
    with sluice.open(tmp_path) as checkpoint:
        first.unlink()  # nobody looks at it
        read = []
        real = os.preadv

        def record(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            read.append(os.fstat(descriptor).st_ino)
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", record)
        assert checkpoint["c"][0].read().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert set(read) == {second.stat().st_ino}


def test_torch_is_not_imported(tmp_path: Path) -> None:
    two_shards(tmp_path)
    code = "import sluice, sys; print(len(sluice.open(sys.argv[1]))); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_distribution_over_shards(
    tmp_path_factory: pytest.TempPathFactory, placed: dict[str, tuple[int, list[int], bool]]
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    shards: dict[str, Tensors] = {}
    for number, (name, (shard, shape, half)) in enumerate(placed.items()):
        tensor = torch.full(shape, float(number), dtype=torch.float16 if half else torch.float32)
        shards.setdefault(f"{shard}.safetensors", {})[name] = tensor
    save_sharded(directory, SAFETENSORS_INDEX, shards)
    expected = {name: tensor for content in shards.values() for name, tensor in content.items()}
    assert_same(sluice.load_state_dict(directory), expected)
    assert notes(directory) == ""


# What is chosen


def test_the_preference(tmp_path: Path) -> None:
    one = tensors("w")
    for stem in ("model", "diffusion_pytorch_model", "adapter_model"):
        save_sharded(tmp_path, f"{stem}.safetensors.index.json", {f"{stem}-1.safetensors": one})
        save(tmp_path / f"{stem}.safetensors", one)
    for stem in ("pytorch_model", "diffusion_pytorch_model", "adapter_model"):
        save_sharded(tmp_path, f"{stem}.bin.index.json", {f"{stem}-1.bin": one})
        save(tmp_path / f"{stem}.bin", one)
    order = []
    for _ in range(12):
        (file,) = chosen(tmp_path)
        taken = tmp_path / file
        if taken.stem.endswith("-1"):
            taken = tmp_path / f"{taken.stem[:-2]}{taken.suffix}.index.json"
        order.append(taken.name)
        assert (f"{taken.name} was taken" in notes(tmp_path)) == (len(order) < 12)
        taken.unlink()
    assert order == list(_directory._PREFERENCE)
    assert order[:4] == [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]


def test_a_variant_is_taken_only_where_nothing_else_is_there(tmp_path: Path) -> None:
    one = tensors("w")
    save(tmp_path / "pytorch_model.fp16.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.fp16.bin"]
    assert "Only the variant 'fp16'" in notes(tmp_path)
    save_sharded(tmp_path, "model.safetensors.index.fp16.json", {"model.fp16-00001-of-00001.safetensors": one})
    assert chosen(tmp_path) == ["model.fp16-00001-of-00001.safetensors"]
    assert "left out: pytorch_model.fp16.bin" in notes(tmp_path)
    save(tmp_path / "model.fp16.safetensors", one)
    assert chosen(tmp_path) == ["model.fp16.safetensors"]
    save(tmp_path / "model.ema.safetensors", one)
    error = refusal(tmp_path)
    assert isinstance(error, sluice.FormatError)
    assert "several variants" in error.problem
    assert "model.ema.safetensors" in str(error.found)
    assert "model.fp16.safetensors" in str(error.found)
    save(tmp_path / "pytorch_model.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.bin"]
    assert "variant" not in notes(tmp_path)


def test_an_index_of_another_name(tmp_path: Path) -> None:
    save_sharded(tmp_path, "consolidated.safetensors.index.json", {"x": tensors("w")})
    save(tmp_path / "left-alone.safetensors", tensors("other"))
    assert chosen(tmp_path) == ["x"]
    save_sharded(tmp_path, "other.safetensors.index.json", {"x": tensors("w")})
    assert "several shard indexes" in refusal(tmp_path).problem


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"], "pytorch_model.bin"),
        (["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"], "model.safetensors"),
        (["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"], "adapter_model.safetensors"),
        (["diffusion_pytorch_model.safetensors", "config.json"], "diffusion_pytorch_model.safetensors"),
    ],
    ids=["accelerate", "Trainer", "peft", "diffusers"],
)
def test_output_directories(tmp_path: Path, files: Sequence[str], expected: str) -> None:
    for name in files:
        if name.endswith((".json", ".pkl")):
            (tmp_path / name).write_text("{}")
        else:
            save(tmp_path / name, tensors("w") if name == expected else {"state": {}, "lr": 0.1})
    assert chosen(tmp_path) == [expected]


def test_parts_come_before_parameters(tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", tensors("b"))
    save(tmp_path / "a.safetensors", tensors("a"))
    save(tmp_path / "c.pt", torch.ones(1))
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors-parts"
        assert list(checkpoint) == ["a", "b"]
    assert notes(tmp_path) == "Left out beside the .safetensors files: c.pt."


def test_nested_directories_are_not_searched(tmp_path: Path) -> None:
    save(tmp_path / "unet" / "model.safetensors", tensors("w"))
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "w.pt").mkdir()
    error = refusal(tmp_path)
    assert isinstance(error, sluice.FormatError)
    assert "nested directories are not searched" in error.problem
    assert error.found == "'model.safetensors', 'unet', 'w.pt'"
    assert error.file == str(tmp_path)


def test_an_empty_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path).found == "nothing"


def test_what_is_there_is_listed_in_part(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").touch()
    assert str(refusal(tmp_path).found).endswith("and 12 more")


def test_a_model_file_comes_before_a_distributed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02.")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    save(tmp_path / "part.safetensors", tensors("w"))
    assert refusal(tmp_path).file == str(tmp_path / ".metadata")
    save(tmp_path / "model.safetensors", tensors("w"))
    assert chosen(tmp_path) == ["model.safetensors"]


def test_json_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert isinstance(refusal(tmp_path / "config.json"), sluice.UnsupportedError)


def test_a_directory_whose_name_ends_like_an_index(tmp_path: Path) -> None:
    save(tmp_path / "x.json" / "model.safetensors", tensors("w"))
    assert chosen(tmp_path / "x.json") == ["model.safetensors"]


# What is refused


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", tensors("fine", "twice", "elsewhere"))
    save(tmp_path / "2.safetensors", tensors("twice"))
    index = write_index(
        tmp_path / SAFETENSORS_INDEX,
        {
            "1.safetensors": ["fine", "twice", "gone"],
            "2.safetensors": ["elsewhere"],
            "3.safetensors": ["a", "b"],
            "4.safetensors": ["c"],
        },
    )
    error = refusal(tmp_path)
    assert isinstance(error, sluice.IncompleteCheckpointError)
    assert error.file == str(index)
    for line in (
        "missing files (2):",
        "'3.safetensors', tensors: 2",
        "'4.safetensors', tensors: 1",
        "in two files (1):",
        "'twice' in '1.safetensors' and '2.safetensors'",
        "not where the index says (2):",
        "'gone' is neither in '1.safetensors' nor in another file",
        "'elsewhere' is in '1.safetensors', not in '2.safetensors'",
    ):
        assert line in error.problem


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_contradictions_alone_are_a_format_error(tmp_path: Path, suffix: str) -> None:
    save(tmp_path / f"1{suffix}", tensors("a"))
    save(tmp_path / f"2{suffix}", tensors("a", "b"))
    write_index(tmp_path / "x.index.json", {f"1{suffix}": ["a"], f"2{suffix}": ["b"]})
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert f"'a' in '1{suffix}' and '2{suffix}'" in error.problem


def test_a_shard_without_tensors_has_none_of_those_that_the_index_gives_it(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", {})
    save(tmp_path / "2.safetensors", tensors("a"))
    write_index(tmp_path / SAFETENSORS_INDEX, {"1.safetensors": ["b"], "2.safetensors": ["a"]})
    assert "'b' is neither in '1.safetensors'" in refusal(tmp_path).problem


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)], {3: torch.ones(2)}, {}], ids=str)
def test_a_shard_that_is_no_state_dict(tmp_path: Path, content: object) -> None:
    save(tmp_path / "1.bin", content)
    save(tmp_path / "2.bin", tensors("b"))
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["a"], "2.bin": ["b"]})
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert ("'1.bin' does not hold a state dict" if content != {} else "'a' is neither in") in error.problem


def test_tensors_that_the_index_leaves_out_are_kept_and_said(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", tensors("a", "extra"))
    write_index(tmp_path / SAFETENSORS_INDEX, {"1.safetensors": ["a"]}, total_size=48)
    assert notes(tmp_path) == "In the shards, but not in their index: extra."
    assert set(sluice.load_state_dict(tmp_path)) == {"a", "extra"}


@pytest.mark.parametrize(("claimed", "lies"), [(144, False), (96, False), (144.0, False), (95, True), (0, True)])
def test_a_total_size_that_lies_is_said(tmp_path: Path, claimed: float, lies: bool) -> None:
    """Both sums are in use: that of the names, and that of the stored bytes, where tied tensors count once."""
    tied = torch.ones(12)
    save(tmp_path / "1.bin", {"a": tied, "b": tied, "c": torch.zeros(12)})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["a", "b", "c"]}, total_size=claimed)
    assert (f"total size of {claimed} bytes" in notes(tmp_path)) == lies


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "C:x", "a\\b", "a/../../x"])
def test_an_index_that_leads_outside(tmp_path: Path, file: str) -> None:
    save(tmp_path / "secret.safetensors", tensors("w"))
    (tmp_path / "d").mkdir()
    write_index(tmp_path / "d" / SAFETENSORS_INDEX, {file: ["w"]})
    assert isinstance(refusal(tmp_path / "d"), sluice.PathEscapeError)
    assert isinstance(refusal(tmp_path / "d" / SAFETENSORS_INDEX), sluice.PathEscapeError)


def test_shards_may_lie_in_a_subdirectory(tmp_path: Path) -> None:
    save_sharded(tmp_path, SAFETENSORS_INDEX, {"part/1.safetensors": tensors("w")})
    assert chosen(tmp_path) == ["part/1.safetensors"]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    first, second = two_shards(tmp_path)
    os.truncate(second, second.stat().st_size - 1)
    model = empty()
    with pytest.raises(sluice.TruncatedError) as caught:
        sluice.load_into(model, tmp_path)
    assert caught.value.file == str(second)
    assert all(parameter.is_meta for parameter in model.parameters())
    first.unlink()
    error = refusal(tmp_path)
    assert isinstance(error, sluice.IncompleteCheckpointError)
    assert f"'{first.name}', tensors: 2" in error.problem
    assert f"damaged (1):\n    {second}" in error.problem


def test_the_first_damaged_shard_stops_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:03}.safetensors" for number in range(200)]
    for name in names:
        (tmp_path / name).write_bytes(b"damaged damaged")
    opened = []
    real = _opening._open_file

    def record(path: str, limits: sluice.Limits) -> object:
        opened.append(path)
        return real(path, limits)

    monkeypatch.setattr(_opening, "_open_file", record)
    assert isinstance(refusal(tmp_path), sluice.FormatError)
    assert len(opened) < 40
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sluice-")]


def test_an_interrupt_stops_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        save(tmp_path / f"{number}.safetensors", tensors(str(number)))
    real = _opening._open_file
    interrupted = threading.Event()

    def interrupt(path: str, limits: sluice.Limits) -> object:
        if threading.current_thread() is threading.main_thread():
            interrupted.set()
            raise KeyboardInterrupt
        assert interrupted.wait(10)
        return real(path, limits)

    monkeypatch.setattr(_opening, "_open_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sluice.open(tmp_path)


def test_a_process_that_may_start_no_thread_opens_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_shards(tmp_path)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with sluice.open(tmp_path) as checkpoint:
            assert len(checkpoint) == 4


def test_parts_must_not_repeat_names(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", tensors("a", "b"))
    save(tmp_path / "y.safetensors", tensors("b", "c"))
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert "'b' in 'x.safetensors' and 'y.safetensors'" in error.problem


@pytest.mark.parametrize("first", [0, 1])
def test_parts_that_count_must_be_complete(tmp_path: Path, first: int) -> None:
    names = [f"model-{number:05}-of-00003.safetensors" for number in range(first, first + 3)]
    for name in names:
        save(tmp_path / name, tensors(name))
    assert chosen(tmp_path) == names
    (tmp_path / names[1]).unlink()
    error = refusal(tmp_path)
    assert isinstance(error, sluice.IncompleteCheckpointError)
    assert repr(names[1]) in error.problem


def test_parts_that_claim_to_be_many(tmp_path: Path) -> None:
    for letter in "abc":
        save(tmp_path / f"{letter}-00001-of-99999.safetensors", tensors(letter))
    started = time.perf_counter()
    assert isinstance(refusal(tmp_path), sluice.LimitError)
    assert time.perf_counter() - started < 2


def test_a_parameter_file_that_holds_more_than_one_tensor(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", torch.ones(2))
    save(tmp_path / "last.pt", {"model": tensors("w")})
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert "'last.pt' does not hold one tensor" in error.problem
    assert "a.pt" not in error.problem


@pytest.mark.parametrize("limits", [sluice.Limits(files=2), sluice.Limits(entries=2)], ids=["files", "entries"])
def test_limits(tmp_path: Path, limits: sluice.Limits) -> None:
    for name in "abc":
        save(tmp_path / f"{name}.pt", torch.ones(2))
    assert isinstance(refusal(tmp_path, limits), sluice.LimitError)


# Links and special files


def snapshot(tmp_path: Path) -> Path:
    """Lay out a sharded model as the cache of huggingface_hub does; return its snapshot."""
    two_shards(tmp_path / "blobs")
    directory = tmp_path / "snapshots" / "0123abcd"
    directory.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"{number:040x}"))
        (directory / file.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    return directory


def test_snapshots_are_links_to_blobs(tmp_path: Path) -> None:
    directory = snapshot(tmp_path)
    assert set(sluice.load_state_dict(directory)) == {"a.w", "a.b", "c", "b.w"}
    assert set(sluice.load_state_dict(directory / SAFETENSORS_INDEX)) == {"a.w", "a.b", "c", "b.w"}


def test_links_that_lead_outside_can_be_refused(tmp_path: Path) -> None:
    strict = sluice.Limits(symlinks_outside=False)
    directory = snapshot(tmp_path)
    assert isinstance(refusal(directory, strict), sluice.PathEscapeError)
    index = directory / SAFETENSORS_INDEX
    index.write_bytes(index.read_bytes())  # through the link
    target = index.resolve()
    index.unlink()
    index.write_bytes(target.read_bytes())
    error = refusal(directory, strict)
    assert isinstance(error, sluice.PathEscapeError)
    assert "model-0000" in str(error.file)
    for link in directory.glob("*.safetensors"):
        kept = link.resolve()
        link.unlink()
        kept.rename(directory / f"kept-{link.name}")
        link.symlink_to(f"kept-{link.name}")
    with sluice.open(directory, limits=strict) as checkpoint:
        assert len(checkpoint) == 4


def test_a_directory_may_be_a_link_itself(tmp_path: Path) -> None:
    two_shards(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with sluice.open(tmp_path / "link", limits=sluice.Limits(symlinks_outside=False)) as checkpoint:
        assert len(checkpoint) == 4


def test_a_snapshot_whose_blob_was_never_downloaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/none")
    error = refusal(tmp_path)
    assert isinstance(error, sluice.IncompleteCheckpointError)
    assert "'model.safetensors'" in error.problem


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    for limits in (None, sluice.Limits(symlinks_outside=False)):
        error = refusal(tmp_path, limits)
        assert isinstance(error, sluice.ReadError)
        assert error.file == str(tmp_path / "model.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    assert isinstance(refusal(tmp_path / "loop"), sluice.ReadError)


def test_special_files_are_passed_over_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("model.safetensors")
    os.mkfifo("noise")
    (tmp_path / "w.pt").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("pytorch_model.bin")
    error = refusal(tmp_path)
    assert isinstance(error, sluice.FormatError)
    assert (error.file, error.found) == (str(tmp_path / "w.pt"), "a character device")
    (tmp_path / "w.pt").unlink()
    assert "no regular files: model.safetensors, pytorch_model.bin" in str(refusal(tmp_path).found)
    save(tmp_path / "w.pt", torch.ones(2))
    assert chosen(tmp_path) == ["w.pt"]
    assert notes(tmp_path) == "Passed over, as they are no regular files: model.safetensors, pytorch_model.bin."


def test_a_shard_that_is_special(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.safetensors")
    (tmp_path / "2.safetensors").mkdir()
    write_index(tmp_path / SAFETENSORS_INDEX, {"1.safetensors": ["a"]})
    assert isinstance(refusal(tmp_path), sluice.FormatError)
    write_index(tmp_path / SAFETENSORS_INDEX, {"2.safetensors": ["a"]})
    assert isinstance(refusal(tmp_path), sluice.UnsupportedError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_directories(tmp_path: Path) -> None:
    first, _ = two_shards(tmp_path)
    first.chmod(0)
    assert isinstance(refusal(tmp_path), sluice.ReadError)
    tmp_path.chmod(0)
    try:
        assert isinstance(refusal(tmp_path), sluice.ReadError)
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", fail)
    error = refusal(tmp_path)
    assert isinstance(error, sluice.ReadError)
    assert error.file == str(tmp_path)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_unrelated_files_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    save(tmp_path / "model.safetensors", tensors("w"))
    for number in range(count):
        os.mknod(tmp_path / f"{number:06}.{('txt', 'json', 'bin', 'pt')[number % 4]}")
    looked_at: list[object] = []
    real = os.stat

    def record(path: str) -> os.stat_result:
        looked_at.append(path)
        return real(path)

    monkeypatch.setattr(os, "stat", record)
    started = time.perf_counter()
    with sluice.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["w"]
    assert time.perf_counter() - started < 2
    assert set(looked_at) <= {str(tmp_path), str(tmp_path / "model.safetensors")}


# Resources


def test_five_hundred_shards_under_a_small_limit_of_descriptors(tmp_path: Path) -> None:
    shards = {f"{number:03}.bin": {f"w{number}": torch.full((64,), float(number))} for number in range(500)}
    save_sharded(tmp_path, "pytorch_model.bin.index.json", shards)
    code = """if True:
        import resource, sys
        import torch, sluice
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        state_dict = sluice.load_state_dict(sys.argv[1])
        assert all(state_dict[f"w{i}"].eq(i).all() for i in range(500)) and len(state_dict) == 500
    """
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 32


def test_a_thousand_shards_open_fast(tmp_path: Path) -> None:
    shards = {f"{n:04}.safetensors": tensors(*(f"layers.{n}.{i}" for i in range(20))) for n in range(1000)}
    save_sharded(tmp_path, SAFETENSORS_INDEX, shards)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        with sluice.open(tmp_path) as checkpoint:
            assert len(checkpoint) == 20_000
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 2


def test_a_shard_replaced_after_opening_leaves_the_model_alone(tmp_path: Path) -> None:
    saved = list(Net().state_dict().items())
    save_sharded(tmp_path, SAFETENSORS_INDEX, {"1.safetensors": dict(saved[:4]), "2.safetensors": dict(saved[4:])})
    model = empty()
    with sluice.open(tmp_path) as checkpoint:
        save(tmp_path / "new.safetensors", dict(saved[4:]))
        (tmp_path / "new.safetensors").replace(tmp_path / "2.safetensors")
        with pytest.raises(sluice.SourceChangedError) as caught:
            sluice.load_into(model, checkpoint)
    assert caught.value.file == str(tmp_path / "2.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_closed_directory_reads_nothing_more(tmp_path: Path) -> None:
    two_shards(tmp_path)
    with sluice.open(tmp_path) as checkpoint:
        tensor = checkpoint["c"]
        tensor.read()
    with pytest.raises(ValueError, match="closed"):
        tensor.read()
    assert repr(checkpoint) == f"<Checkpoint huggingface-safetensors {tmp_path}>"
