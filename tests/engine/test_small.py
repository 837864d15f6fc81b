"""Small plans: bytes that stay as they are go straight into live tensors, and through staging if that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.engine.targets import Targets


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.fixture(params=["safetensors", "pth"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path, expected = tmp_path / f"f.{request.param}", model().state_dict()
    torch.save(expected, path) if request.param == "pth" else sluice.save(expected, path)
    return path, expected


def _equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_live_tensors_need_no_staging(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Targets, "copy_out", lambda *_: pytest.fail("bytes were staged"))
    live = model()
    sluice.load_into(live, saved[0])
    assert _equal(live, saved[1])


def _partly(read: Callable[..., int], descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    return read(descriptor, buffers[:1], offset)


def _refused(read: Callable[..., int], descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    if len(buffers) > 1:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(descriptor, buffers, offset)


@pytest.mark.parametrize("fault", [_partly, _refused])
def test_what_one_call_does_not_read_is_staged(
    saved: tuple[Path, dict[str, torch.Tensor]], fault: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: fault(read, *arguments))
    live = model()
    report = sluice.load_into(live, saved[0])
    assert _equal(live, saved[1])
    assert report.reads["buffered"] == report.read_bytes
