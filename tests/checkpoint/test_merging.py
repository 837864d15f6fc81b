"""Refused directories and shard indexes, and their error texts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import sluice
from sluice.checkpoint import several_files as _several_files
from support.directories import (
    SAFETENSORS_INDEX,
    chosen,
    notes,
    refusal,
    save,
    save_sharded,
    tensors,
    two_shards,
    write_index,
)
from support.quantized import Scaled, parts_in
from support.watching import watch
from support.work import at_most


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
    error = refusal(tmp_path, sluice.IncompleteCheckpointError)
    assert error.file == str(index)
    for line in (
        "missing files (2):",
        "'3.safetensors', tensors: 2",
        "'4.safetensors', tensors: 1",
        "in two files (1):",
        "'twice' in '1.safetensors' and '2.safetensors'",
        "not in the shard that the index names (2):",
        "'gone' is neither in '1.safetensors' nor in any other file",
        "'elsewhere' is in '1.safetensors', not in '2.safetensors'",
    ):
        assert line in error.problem


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_contradictions_alone_are_a_format_error(tmp_path: Path, suffix: str) -> None:
    save(tmp_path / f"1{suffix}", tensors("a"))
    save(tmp_path / f"2{suffix}", tensors("a", "b"))
    if suffix == ".safetensors":  # parts without an index
        assert type(refusal(tmp_path, problem="'a' in '1.safetensors' and '2.safetensors'")) is sluice.FormatError
    write_index(tmp_path / "x.index.json", {f"1{suffix}": ["a"], f"2{suffix}": ["b"]})
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert f"'a' in '1{suffix}' and '2{suffix}'" in error.problem


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)], {3: torch.ones(2)}, {}], ids=str)
def test_a_shard_that_is_not_a_state_dict(tmp_path: Path, content: object) -> None:
    save(tmp_path / "1.bin", content)
    save(tmp_path / "2.bin", tensors("b"))
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["a"], "2.bin": ["b"]})
    error = refusal(tmp_path)
    assert type(error) is sluice.FormatError
    assert ("'1.bin' does not hold a state dict" if content != {} else "'a' is neither in") in error.problem


def test_tensors_that_the_index_omits_are_kept_and_reported(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", tensors("a", "extra"))
    write_index(tmp_path / SAFETENSORS_INDEX, {"1.safetensors": ["a"]}, total_size=48)
    assert notes(tmp_path) == "In the shards, but not in their index (1): extra."
    assert set(sluice.load_state_dict(tmp_path)) == {"a", "extra"}


def test_nested_tensors_that_wrap_others_keep_their_bytes(tmp_path: Path) -> None:
    integers, scale = torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2, 1)
    save(tmp_path / "1.bin", tensors("a", "b", "c"))
    save(tmp_path / "2.bin", {"d": {"q": Scaled(integers, scale, torch.float32)}})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["a", "b", "c"], "2.bin": ["d"]})
    with sluice.open(tmp_path) as checkpoint:
        found = parts_in(checkpoint, "d", "q")
    assert torch.equal(found["integers"], integers)
    assert torch.equal(found["scale"], scale)


@pytest.mark.parametrize(("claimed", "lies"), [(144, False), (96, False), (144.0, False), (95, True), (0, True)])
def test_a_wrong_total_size_is_reported(tmp_path: Path, claimed: float, lies: bool) -> None:
    """Two sums are in use: over all names, and over stored bytes, in which tied tensors count once."""
    tied = torch.ones(12)
    save(tmp_path / "1.bin", {"a": tied, "b": tied, "c": torch.zeros(12)})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"1.bin": ["a", "b", "c"]}, total_size=claimed)
    assert (f"total size of {claimed} bytes" in notes(tmp_path)) == lies


def test_shards_may_lie_in_a_subdirectory(tmp_path: Path) -> None:
    save_sharded(tmp_path, SAFETENSORS_INDEX, {"part/1.safetensors": tensors("w")})
    assert chosen(tmp_path) == ["part/1.safetensors"]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    first, second = two_shards(tmp_path)
    os.truncate(second, second.stat().st_size - 1)
    model = torch.nn.Linear(4, 5, device="meta")
    with pytest.raises(sluice.TruncatedError) as caught:
        sluice.load_into(model, tmp_path)
    assert caught.value.file == str(second)
    assert all(parameter.is_meta for parameter in model.parameters())
    first.unlink()
    error = refusal(tmp_path, sluice.IncompleteCheckpointError, f"'{first.name}', tensors: 2")
    assert f"damaged (1):\n    {second}" in error.problem


def test_the_first_damaged_shard_stops_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:03}.safetensors" for number in range(200)]
    for name in names:
        (tmp_path / name).write_bytes(b"damaged damaged")
    opened: list[str] = []
    watch(monkeypatch, _several_files, "open_file", lambda source, *_: opened.append(source.path))
    refusal(tmp_path, sluice.FormatError)
    assert len(opened) < 40
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sluice-")]


def test_an_interrupt_stops_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        save(tmp_path / f"{number}.safetensors", tensors(str(number)))
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            interrupted.set()
            raise KeyboardInterrupt
        assert interrupted.wait(10)

    watch(monkeypatch, _several_files, "open_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sluice.open(tmp_path)


def test_a_process_that_may_start_no_thread_opens_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_shards(tmp_path)
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    with sluice.open(tmp_path) as checkpoint:
        assert len(checkpoint) == 4


@pytest.mark.parametrize("first", [0, 1])
def test_parts_that_count_must_be_complete(tmp_path: Path, first: int) -> None:
    names = [f"model-{number:05}-of-00003.safetensors" for number in range(first, first + 3)]
    for name in names:
        save(tmp_path / name, tensors(name))
    assert chosen(tmp_path) == names
    (tmp_path / names[1]).unlink()
    refusal(tmp_path, sluice.IncompleteCheckpointError, repr(names[1]))


def test_parts_that_claim_to_be_many(tmp_path: Path) -> None:
    for letter in "abc":
        save(tmp_path / f"{letter}-00001-of-99999.safetensors", tensors(letter))
    with at_most(1_000_000):
        refusal(tmp_path, sluice.LimitError)


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
    refusal(tmp_path, sluice.LimitError, limits=limits)
