"""Choice of the files of a directory that are the checkpoint; links and special files."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice.checkpoint import survey as _directory
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
from support.watching import watch
from support.work import at_most


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
        assert (f"{taken.name} was chosen" in notes(tmp_path)) == (len(order) < 12)
        taken.unlink()
    assert order == list(_directory._PREFERENCE)
    assert order[:4] == [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]


def test_a_variant_is_selected_only_without_a_default(tmp_path: Path) -> None:
    one = tensors("w")
    save(tmp_path / "pytorch_model.fp16.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.fp16.bin"]
    assert "The model exists only as the variant 'fp16'" in notes(tmp_path)
    save_sharded(tmp_path, "model.safetensors.index.fp16.json", {"model.fp16-00001-of-00001.safetensors": one})
    assert chosen(tmp_path) == ["model.fp16-00001-of-00001.safetensors"]
    assert "left out (1): pytorch_model.fp16.bin" in notes(tmp_path)
    save(tmp_path / "model.fp16.safetensors", one)
    assert chosen(tmp_path) == ["model.fp16.safetensors"]
    save(tmp_path / "model.ema.safetensors", one)
    error = refusal(tmp_path, sluice.FormatError, "several variants")
    assert "model.ema.safetensors" in str(error.found)
    assert "model.fp16.safetensors" in str(error.found)
    save(tmp_path / "pytorch_model.bin", one)
    assert chosen(tmp_path) == ["pytorch_model.bin"]
    assert "variant" not in notes(tmp_path)


def test_an_index_with_a_different_name(tmp_path: Path) -> None:
    save_sharded(tmp_path, "consolidated.safetensors.index.json", {"x": tensors("w")})
    save(tmp_path / "left-alone.safetensors", tensors("other"))
    assert chosen(tmp_path) == ["x"]
    save_sharded(tmp_path, "other.safetensors.index.json", {"x": tensors("w")})
    assert "several shard indexes" in refusal(tmp_path).problem


def test_parts_come_before_parameters(tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", tensors("b"))
    save(tmp_path / "a.safetensors", tensors("a"))
    save(tmp_path / "c.pt", torch.ones(1))
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors-parts"
        assert list(checkpoint) == ["a", "b"]
    assert notes(tmp_path) == "Left out, because there are .safetensors files (1): c.pt."


def test_nested_directories_are_not_searched(tmp_path: Path) -> None:
    save(tmp_path / "unet" / "model.safetensors", tensors("w"))
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "w.pt").mkdir()
    error = refusal(tmp_path, sluice.FormatError, "subdirectories are not searched")
    assert error.found == "'model.safetensors', 'unet', 'w.pt'"
    assert error.file == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["config.json", "model.safetensors.incomplete"], sluice.IncompleteCheckpointError, "was never completed"),
        (["blobs", "refs", "snapshots"], sluice.FormatError, "pass a directory in 'snapshots'"),
        (["model_index.json", "unet"], sluice.FormatError, "a pipeline of models: pass the directory of one"),
        (["checkpoint-500", "checkpoint-9"], sluice.FormatError, "one of its checkpoints instead, such as"),
        (["data", "data.pkl", "version"], sluice.FormatError, "unpacked torch.save file"),
        (["consolidated.00.pth", "params.json"], sluice.FormatError, "a file instead, such as 'consolidated.00.pth'"),
        (["config.json", "tf_model.h5"], sluice.UnsupportedError, "does not read 'tf_model.h5'"),
        (["__0.metadata", "__0_0.distcp"], sluice.UnsupportedError, "use_collectives=False"),
        ([f"{number}.txt" for number in range(20)], sluice.FormatError, "and 12 more"),
    ],
)
def test_names_of_files_decide_the_error(
    tmp_path: Path, names: Sequence[str], kind: type[sluice.SluiceError], words: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    error = refusal(tmp_path)
    assert type(error) is kind
    assert words in str(error)


def test_checkpoints_of_their_own_in_one_directory(tmp_path: Path) -> None:
    for name in ("1.pt", "2.pt"):
        save(tmp_path / name, {"model": tensors("w")})
    assert "pass the path of one, such as '1.pt'" in str(refusal(tmp_path))


def test_a_model_file_comes_before_a_distributed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02.")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    save(tmp_path / "part.safetensors", tensors("w"))
    assert refusal(tmp_path).file == str(tmp_path / ".metadata")
    save(tmp_path / "model.safetensors", tensors("w"))
    assert chosen(tmp_path) == ["model.safetensors"]


def test_a_directory_whose_name_ends_like_an_index(tmp_path: Path) -> None:
    save(tmp_path / "x.json" / "model.safetensors", tensors("w"))
    assert chosen(tmp_path / "x.json") == ["model.safetensors"]


def test_training_states_next_to_a_model_are_named(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "optimizer_1.bin", "training_args.bin", "other.bin"):
        (tmp_path / name).write_bytes(b"")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with sluice.open(tmp_path) as checkpoint:
        assert checkpoint.index.notes == (
            "Next to the model, each a separate checkpoint (3): optimizer.pt, optimizer_1.bin, scheduler.pt.",
        )


def test_snapshots_are_links_to_blobs_which_can_be_refused(tmp_path: Path) -> None:
    """As the cache of huggingface_hub has a sharded model."""
    two_shards(tmp_path / "blobs")
    directory = tmp_path / "snapshots" / "0123abcd"
    directory.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"{number:040x}"))
        (directory / file.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    assert set(sluice.load_state_dict(directory)) == {"a.w", "a.b", "c", "b.w"}
    assert set(sluice.load_state_dict(directory / SAFETENSORS_INDEX)) == {"a.w", "a.b", "c", "b.w"}
    refusal(directory, sluice.PathEscapeError, limits=sluice.Limits(symlinks_outside=False))


def test_a_directory_may_be_a_link_itself(tmp_path: Path) -> None:
    two_shards(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with sluice.open(tmp_path / "link", limits=sluice.Limits(symlinks_outside=False)) as checkpoint:
        assert len(checkpoint) == 4


def test_a_snapshot_whose_blob_was_never_downloaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/none")
    refusal(tmp_path, sluice.IncompleteCheckpointError, "'model.safetensors'")


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    for limits in (None, sluice.Limits(symlinks_outside=False)):
        error = refusal(tmp_path, sluice.ReadError, limits=limits)
        assert error.file == str(tmp_path / "model.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    refusal(tmp_path / "loop", sluice.ReadError)


def test_special_files_are_skipped_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("model.safetensors")
    os.mkfifo("noise")
    (tmp_path / "w.pt").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("pytorch_model.bin")
    error = refusal(tmp_path, sluice.UnsupportedError)
    assert error.file == str(tmp_path / "w.pt")
    assert "a character device" in str(error)
    (tmp_path / "w.pt").unlink()
    assert "not regular files (2): model.safetensors, pytorch_model.bin" in str(refusal(tmp_path).found)
    save(tmp_path / "w.pt", torch.ones(2))
    assert chosen(tmp_path) == ["w.pt"]
    assert notes(tmp_path) == "Skipped, because they are not regular files (2): model.safetensors, pytorch_model.bin."


def test_a_shard_that_is_special(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.safetensors")
    (tmp_path / "2.safetensors").mkdir()
    write_index(tmp_path / SAFETENSORS_INDEX, {"1.safetensors": ["a"]})
    refusal(tmp_path, sluice.UnsupportedError)
    write_index(tmp_path / SAFETENSORS_INDEX, {"2.safetensors": ["a"]})
    refusal(tmp_path, sluice.UnsupportedError)


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    error = refusal(tmp_path, sluice.ReadError)
    assert error.file == str(tmp_path)


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_unrelated_files_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    save(tmp_path / "model.safetensors", tensors("w"))
    for number in range(count):
        os.mknod(tmp_path / f"{number:06}.{('txt', 'json', 'bin', 'pt')[number % 4]}")
    looked_at: list[str] = []
    watch(monkeypatch, os, "stat", looked_at.append)
    with at_most(100 * count), sluice.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["w"]
    assert set(looked_at) <= {str(tmp_path), str(tmp_path / "model.safetensors")}
