"""Directories with sockets, FIFOs, unreadable files and other entries besides the checkpoint."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice


def test_a_directory_with_special_files_next_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    torch.save({"w": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    for name in ("a.safetensors", "b.bin", "c.pt", "d.index.json.x", ".metadata.tmp", "e"):
        os.mkfifo(name)
    for name in ("loop", "up.safetensors", "x.pt"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "self").symlink_to(".")
    (tmp_path / "null.bin").symlink_to(os.devnull)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "unreadable.pt").write_bytes(b"x")
    (tmp_path / "unreadable.pt").chmod(0)
    (tmp_path / os.fsdecode(b"not-utf-8-\xff.safetensors")).touch()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("s.pt")
    real, opened = os.open, []

    def record(path: str, *arguments: Any) -> int:
        opened.append(str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", record)
    assert sluice.load_state_dict(tmp_path)["w"].eq(1).all()
    ours = [path for path in opened if path.startswith(str(tmp_path))]
    assert set(ours) == {str(tmp_path / "pytorch_model.bin")}


def test_a_shard_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        torch.save(torch.ones(2), tmp_path / f"{name}.pt")
    real = os.open

    def refuse(path: str, *arguments: Any) -> int:
        if str(path).endswith("b.pt"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(sluice.ReadError, match="Permission denied") as caught:
        sluice.load_state_dict(tmp_path)
    assert caught.value.file == str(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "name", [".", "./m.safetensors", "m.safetensors/", "x\0y", "C:x", "m.safetensors/../m", "", "../x", "/etc/passwd"]
)
def test_names_of_shards_that_are_not_plain(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(sluice.PathEscapeError, match="not a plain path"):
        sluice.open(tmp_path)
