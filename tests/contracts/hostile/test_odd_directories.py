"""A directory with sockets, FIFOs, unreadable files and other entries besides the checkpoint."""

from __future__ import annotations

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
