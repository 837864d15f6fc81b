"""``load_into`` from files, against ``load_state_dict(torch.load())``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from support.trained_net import assert_equal


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


def empty() -> Net:
    with sluice.empty_init():
        return Net()


def test_an_empty_model_becomes_the_saved_one(file: Path) -> None:
    expected = saved(file)
    model = empty().eval()
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
    model = empty().to(torch.bfloat16)
    report = sluice.load_into(model, file)
    assert_equal(model, expected.to(torch.bfloat16))
    assert report.cast["float32->bfloat16"] == 8
    again = empty().to(torch.bfloat16)
    sluice.load_into(again, file, dtype="auto")
    assert again.embedding.weight.dtype == torch.float32


def test_dtype_casts_loaded_tensors_but_not_computed_buffers(file: Path) -> None:
    expected = saved(file)
    model = empty()
    sluice.load_into(model, file, dtype=torch.bfloat16)
    assert model.get_buffer("positions").dtype == torch.float32
    assert model.get_buffer("norm.num_batches_tracked").dtype == torch.int64
    assert torch.equal(model.embedding.weight, expected.embedding.weight.to(torch.bfloat16))


def test_budget_errors_come_before_any_data_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(file)
    model = empty()
    with pytest.raises(sluice.BudgetError, match=r"MemoryLimits\(host=\.\.\.\)"):
        sluice.load_into(model, file, memory=sluice.MemoryLimits(host="1MiB"))
    assert model.embedding.weight.is_meta


class FailAt:
    """``os.preadv`` that fails its k-th call with buffers of at least 1 KiB: data, but not headers."""

    def __init__(self, k: int) -> None:
        self.k, self.calls, self.real = k, 0, os.preadv

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        self.calls += len(buffers[0]) >= 1024
        if self.calls == self.k and len(buffers[0]) >= 1024:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.real(descriptor, buffers, offset, flags)


def test_a_failing_read_leaves_an_empty_model_empty_whichever_read_it_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(file)
    for k in range(1, 100):
        model = empty()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", FailAt(k))
            try:
                sluice.load_into(model, file)
            except sluice.ReadError as error:
                assert error.file == str(file)
                assert error.offset is not None
                assert all(tensor.is_meta for tensor in model.state_dict().values())
                continue
        assert_equal(model.eval(), expected)
        assert k > 2
        return
    pytest.fail("the load never succeeded")


def test_a_failing_read_reports_the_state_of_live_parameters(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved(file)
    state = expected.state_dict()
    seen = set()
    for k in range(1, 100):
        model = Net()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", FailAt(k))
            try:
                sluice.load_into(model, file)
            except sluice.PartialLoadError as error:
                seen.add("partial")
                assert isinstance(error.__cause__, sluice.ReadError)
                for name in error.done:
                    assert torch.equal(model.state_dict()[name], state[name]), name
                for name in error.untouched:
                    assert torch.equal(model.state_dict()[name], before[name]), name
                assert {*error.done, *error.torn, *error.untouched} == before.keys() - {"head.weight"}
                continue
            except sluice.ReadError:
                seen.add("untouched")
                assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
                continue
        assert "partial" in seen
        return
    pytest.fail("the load never succeeded")


def test_an_interrupt_stays_an_interrupt_and_reports_the_state(file: Path) -> None:
    saved(file)

    def interrupt(_: sluice.ProgressEvent) -> None:
        raise KeyboardInterrupt

    model = empty()
    with pytest.raises(KeyboardInterrupt):
        sluice.load_into(model, file, progress=interrupt)
    assert model.embedding.weight.is_meta
    with pytest.raises(KeyboardInterrupt) as caught:
        sluice.load_into(Net(), file, progress=interrupt)
    assert "the load failed after live tensors began to change" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, sluice.CheckpointError),
        (b"", sluice.TruncatedError),
        (b"no checkpoint at all, just text", sluice.FormatError),
        (b"PK\x03\x04" + bytes(100), sluice.TruncatedError),
        ((1 << 40).to_bytes(8, "little") + b'{"a":1}', sluice.CheckpointError),
    ],
)
def test_bad_files_leave_the_model_alone(tmp_path: Path, content: bytes | None, error: type[Exception]) -> None:
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    model = empty()
    with pytest.raises(error) as caught:
        sluice.load_into(model, tmp_path / "f")
    assert str(tmp_path / "f") in str(caught.value)
    assert model.embedding.weight.is_meta
