"""Directories of parameters on file systems without hard links."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice

BASE = torch.arange(400_000.0)  # more than is copied at once


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV])
@pytest.mark.parametrize("convert", [False, True])
def test_tied_names_are_copies_without_hard_links(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    convert: bool,
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    state = {"a": BASE, "b": BASE}
    torch.save(state, tmp_path / "f.pt")
    monkeypatch.setattr(os, "link", link)
    if convert:
        sluice.convert(tmp_path / "f.pt", tmp_path / "p", format="per-parameter")
    else:
        sluice.save(state, tmp_path / "p", format="per-parameter")
    found = sluice.load_state_dict(tmp_path / "p")
    assert torch.equal(found["a"], BASE)
    assert torch.equal(found["b"], BASE)
    assert (tmp_path / "p" / "a.pt").read_bytes() == (tmp_path / "p" / "b.pt").read_bytes()


def test_another_failure_of_a_link_is_a_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(sluice.SaveError, match="Input/output error"):
        sluice.save({"a": BASE, "b": BASE}, tmp_path / "p", format="per-parameter")
    assert not (tmp_path / "p").exists()
