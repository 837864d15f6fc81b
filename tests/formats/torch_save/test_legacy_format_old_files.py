"""Files that old torch wrote with Python 2.7 (``tools/write_old_files.py``) are read as torch reads them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import sluice
from sluice._errors import UnsupportedError
from support import old_files
from support.directories import refusal
from support.oracles import same

FILES = {path.stem: path for path in sorted(Path(old_files.__path__[0]).glob("*.pth"))}

#: Files that only the unrestricted ``torch.load`` reads: they hold integers and text in opcodes of Python 2.
UNRESTRICTED = {"torch-1.0.0-training", "torch-1.4.0-training", "torch-1.0.0-pickle-module"}
UNRESTRICTED |= {"torch-1.0.0-long-text", "torch-1.4.0-protocol-1"}

ENCODINGS = {"torch-1.0.0-latin-1": "latin1"}

READ = [name for name in FILES if name != "torch-1.4.0-zip"]


def load_with_torch(name: str, encoding: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch says that it ignores the encoding, and uses it
        restricted = name not in UNRESTRICTED
        return torch.load(FILES[name], weights_only=restricted, mmap=False, encoding=encoding)


@pytest.mark.parametrize("name", READ)
def test_the_whole_object_is_that_of_torch(name: str) -> None:
    encoding = ENCODINGS.get(name, "utf-8")
    theirs = tree_map_only(torch.Tensor, torch.Tensor.detach, load_with_torch(name, encoding))
    with sluice.open(FILES[name], encoding=encoding) as checkpoint:
        ours = tree_map_only(sluice.LazyTensor, sluice.LazyTensor.read, checkpoint.tree)
    if isinstance(theirs, dict):
        for key in ("size", "device"):  # a torch.Size equals a tuple, a torch.device its text
            if key in theirs:
                assert str(theirs.pop(key)) in {str(ours[key]), f"torch.Size({list(ours[key])})"}
                ours.pop(key)
    assert same(ours, theirs)


#: Files whose state dict is a part of a dict.
WITH_KEY = {name for name in READ if "training" in name} | {"torch-1.0.0-pickle-module", "torch-1.4.0-protocol-1"}


@pytest.mark.parametrize("name", [name for name in READ if name != "torch-1.0.0-tensor"])
def test_verify_load_convert_and_diff(tmp_path: Path, name: str) -> None:
    encoding, path = ENCODINGS.get(name, "utf-8"), FILES[name]
    key = "state_dict" if name in WITH_KEY else None
    assert sluice.verify(path, encoding=encoding).ok
    expected = load_with_torch(name, encoding)
    state_dict = sluice.load_state_dict(path, key=key, encoding=encoding)
    assert same(state_dict, expected[key] if key else expected)
    sluice.convert(path, tmp_path / "x.safetensors", key=key, encoding=encoding)
    with sluice.open(path, key=key, encoding=encoding) as checkpoint:
        assert sluice.diff(checkpoint, tmp_path / "x.safetensors").same


def test_an_optimizer_is_filled() -> None:
    model = torch.nn.Sequential(OrderedDict(conv=torch.nn.Conv2d(2, 3, 2), bn=torch.nn.BatchNorm2d(3)))
    optimizer = torch.optim.Adam(model.parameters())
    sluice.load_optimizer(optimizer, FILES["torch-1.4.0-training"])
    saved = load_with_torch("torch-1.4.0-training", "utf-8")["optimizer"]
    first = saved["state"][saved["param_groups"][0]["params"][0]]
    assert torch.equal(optimizer.state[next(iter(model.parameters()))]["exp_avg"], first["exp_avg"])


def test_text_in_another_encoding_is_not_damage() -> None:
    with pytest.raises(UnsupportedError, match="encoding='latin1'") as caught:
        sluice.verify(FILES["torch-1.0.0-latin-1"])
    assert "damaged" not in str(caught.value)


def test_text_kept_as_bytes() -> None:
    name = "torch-1.0.0-latin-1"
    with sluice.open(FILES[name], encoding="bytes") as checkpoint:
        assert list(checkpoint.tree) == list(load_with_torch(name, "bytes"))


def test_an_unknown_encoding() -> None:
    for encoding in ("utf-99", "zlib"):
        with pytest.raises(ValueError, match="not an encoding of text"):
            sluice.open(FILES["torch-1.0.0-state"], encoding=encoding)


def test_the_experimental_zip_files_are_named() -> None:
    """No other torch reads them."""
    refusal(FILES["torch-1.4.0-zip"], UnsupportedError, "an experimental zip file of torch")
