"""A loaded module can be copied, saved, moved, compiled, trained and taken apart like any other."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.machine.processes import read_memory
from support import fresh_process
from support.oracles import bits
from support.trained_net import TOKENS, Net, empty

#: Memory of their own, or pages of the file.
PLACES = pytest.mark.parametrize("place", ["copy", "map"])


def pair(path: Path, place: Any = "copy") -> tuple[Net, Net]:
    """Return a model and a second one loaded from its file."""
    torch.manual_seed(0)
    expected = Net()
    torch.save(expected.state_dict(), path)
    model = empty(Net)
    sluice.load_into(model, path, place=place)
    return model, expected


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 40_000  # only its own tensors
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


USES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch,
    "half": lambda model: model.half().float(),
    "to": lambda model: model.to(torch.float64),
    "to channels last": lambda model: model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
    "share_memory": lambda model: model.share_memory(),
    "requires_grad": lambda model: model.requires_grad_(False).requires_grad_(True),
}


@PLACES
@pytest.mark.parametrize("use", USES)
def test_uses_of_a_loaded_model_equal_those_of_the_original(use: str, place: str, tmp_path: Path) -> None:
    model, expected = (USES[use](one) for one in pair(tmp_path / "f.pth", place))
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert model.get_parameter("head.weight").is_leaf
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(ours[name]) == bits(tensor)


@PLACES
@pytest.mark.parametrize("use", [None, "share_memory"])
def test_it_trains_like_the_original(use: str | None, place: str, tmp_path: Path) -> None:
    states = []
    for model in pair(tmp_path / "f.pth", place):
        module = USES[use](model) if use else model
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            module(TOKENS).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        states.append(module.state_dict())
    assert all(bits(tensor) == bits(states[1][name]) for name, tensor in states[0].items())
    del model, module, optimizer, states
    gc.collect()  # an optimizer of torch 2.6 is in a cycle, and holds the descriptors of shared memory


_COMPILED = """
import sys, torch, sluice

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))

torch.manual_seed(0)
expected = build().eval()
torch.save(expected.state_dict(), sys.argv[1])
with sluice.empty_init():
    model = build().eval()
sluice.load_into(model, sys.argv[1])
compiled = torch.compile(model, backend="eager")
x = torch.randn(3, 8)
assert torch.equal(compiled(x), expected(x))
with torch.no_grad():
    model[0].weight.zero_()
sluice.load_into(compiled, sys.argv[1])  # in place: the compiled code sees it
assert torch.equal(compiled(x), expected(x))
compiled(x).sum().backward()
"""


@pytest.mark.usefixtures("fresh_processes")
def test_it_compiles(tmp_path: Path) -> None:
    # torch 2.6 makes a temporary directory and removes it at the interpreter's exit, which forked processes skip
    done = fresh_process.run(_COMPILED, tmp_path / "f.pth", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("width", [2048, 96])
def test_deleting_a_part_releases_its_memory(width: int, tmp_path: Path) -> None:
    count = max(8, (64 << 20) // (width * width * 4))

    def build() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    torch.save(build().state_dict(), tmp_path / "f.pth")
    model = empty(build)
    sluice.load_into(model, tmp_path / "f.pth")
    final = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    before = read_memory().total_bytes
    del model[: count // 2]
    gc.collect()
    assert before - read_memory().total_bytes >= 0.9 * final / 2
