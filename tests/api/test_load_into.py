"""``load_into`` from files, against ``load_state_dict(torch.load())``."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from support.trained_net import assert_equal, empty


class Net(nn.Module):
    """A small model with the traps of loading: a tie, a norm with counters, both kinds of buffers."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1200, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1200, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(width, width).triu(1))
        self.register_buffer("positions", torch.arange(width) * 0.5, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.hidden(self.embedding(tokens)) + self.positions)
        out: torch.Tensor = self.head(hidden @ self.mask)
        return out


def saved(path: Path, seed: int = 0) -> Net:
    """Write a model that looks trained and return it."""
    torch.manual_seed(seed)
    model = Net()
    model(torch.arange(64))  # moves the running statistics
    if path.suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        safetensors.torch.save_model(model, str(path))
    return model.eval()


@pytest.fixture(params=["f.pth", "f.safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_an_empty_model_becomes_the_saved_one(file: Path) -> None:
    expected = saved(file)
    model = empty(Net).eval()
    report = sluice.load_into(model, file)
    assert_equal(model, expected)
    assert torch.equal(model(torch.arange(64)), expected(torch.arange(64)))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.get_buffer("positions"), expected.get_buffer("positions"))
    assert report.tied == (("embedding.weight", "head.weight"),)
    assert report.tensors == len(list(model.parameters())) + len(list(model.buffers())) - 1
    assert report.final_bytes == sum(t.nbytes for t in {*model.parameters(), *model.buffers()}) - 1200
    assert report.final_bytes <= report.read_bytes <= report.final_bytes + 4096  # gaps between small neighbors
    assert report.reads == {"direct": 0, "buffered": report.read_bytes}
    assert report.measured is not None


def test_dtype_none_keeps_the_models_and_auto_takes_the_files(file: Path) -> None:
    expected = saved(file)
    model = empty(Net).to(torch.bfloat16)
    report = sluice.load_into(model, file)
    assert_equal(model, expected.to(torch.bfloat16))
    assert report.cast["float32->bfloat16"] == 8
    again = empty(Net).to(torch.bfloat16)
    sluice.load_into(again, file, dtype="auto")
    assert again.embedding.weight.dtype == torch.float32


def test_dtype_casts_loaded_tensors_but_not_computed_buffers(file: Path) -> None:
    expected = saved(file)
    model = empty(Net)
    sluice.load_into(model, file, dtype=torch.bfloat16)
    assert model.get_buffer("positions").dtype == torch.float32
    assert model.get_buffer("norm.num_batches_tracked").dtype == torch.int64
    assert torch.equal(model.embedding.weight, expected.embedding.weight.to(torch.bfloat16))
