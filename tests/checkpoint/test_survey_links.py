"""Directories with links and special files."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import torch

import sluice
from support.directories import SAFETENSORS_INDEX, chosen, notes, refusal, save, tensors, two_shards, write_index
from support.work import at_most


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


def test_special_files_are_skipped_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("model.safetensors")
    os.mkfifo("noise")
    (tmp_path / "w.pt").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("pytorch_model.bin")
    error = refusal(tmp_path)
    assert isinstance(error, sluice.UnsupportedError)
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
    assert isinstance(refusal(tmp_path), sluice.UnsupportedError)
    write_index(tmp_path / SAFETENSORS_INDEX, {"2.safetensors": ["a"]})
    assert isinstance(refusal(tmp_path), sluice.UnsupportedError)


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
    with at_most(100 * count), sluice.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["w"]
    assert set(looked_at) <= {str(tmp_path), str(tmp_path / "model.safetensors")}
