"""The plan of a comparison: methods, size, the model with its checkpoints, and the page cache."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice.benchmark import comparison as _comparison
from sluice.benchmark.comparison import checkpoint_for, default_methods, fitting_size, own_model
from sluice.benchmark.gpt2 import GPTConfig, GPTModel, random_state_dict, random_weight, write_checkpoint
from sluice.benchmark.loads import verdict
from sluice.benchmark.machine import cached_share, make_cold, make_warm
from sluice.benchmark.methods import METHODS, final_bytes, kind_of, main_dtype
from sluice.benchmark.records import Precision
from support.comparisons import job
from support.directories import save

_MODEL = f"{__name__}:Tied"


class Tied(nn.Module):
    """Two names for one weight, an integer buffer, and a non-persistent buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("positions", torch.arange(4), persistent=False)


@pytest.mark.parametrize(
    ("memory_gib", "disk_gib", "per_process", "per_byte", "size"),
    [
        (64, 64, 0.0, 0.0, "xl"),
        (15, 64, 0.0, 0.0, "large"),
        (64, 4, 0.0, 0.0, "medium"),
        (64, 64, 2.0, 5e-10, "large"),
        (64, 64, 2.0, 1e-9, "medium"),
        (64, 64, 2.0, 4e-9, "small"),
        (64, 64, 40.0, 0.0, "small"),  # it takes too long, but there is nothing smaller
        (0, 0, 0.0, 0.0, "small"),
    ],
)
def test_the_size_is_the_largest_that_fits_memory_disk_and_two_minutes(
    memory_gib: int, disk_gib: int, per_process: float, per_byte: float, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_comparison, "_probe_process", lambda _: per_process)
    monkeypatch.setattr(_comparison, "_probe_byte", lambda _: per_byte)
    monkeypatch.setattr("sluice.benchmark.machine.free_memory_bytes", lambda: memory_gib << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk_gib << 30))
    found, seconds = fitting_size(Path(), "cpu", 26)
    assert found == size
    assert seconds <= 120 or found == "small"


def test_the_probe_of_the_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_comparison, "_PROBE_BYTES", 1 << 20)
    assert _comparison._probe_byte(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A training checkpoint of ``Tied`` with its weights under a key."""
    torch.manual_seed(0)
    path = tmp_path / "run.pth"
    torch.save({"model": Tied().state_dict(), "epoch": 3}, path)
    return path


def test_what_a_checkpoint_is_and_the_dtype_of_most_of_its_bytes(own: Path, tmp_path: Path) -> None:
    for name in ("w", "parts/model-00001-of-00002", "parts/model-00002-of-00002"):
        save(tmp_path / f"{name}.safetensors", {name: torch.ones(2)})
    save(tmp_path / "singles" / "w.pt", torch.ones(2))
    found = [kind_of(path) for path in (own, *(tmp_path / name for name in ("w.safetensors", "parts", "singles")))]
    assert found == [".pth", ".safetensors", "shards", ""]
    tensors = {"a": torch.ones(9, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(99, dtype=torch.int64)}
    save_file(tensors, tmp_path / "w.safetensors")
    assert main_dtype(tmp_path / "w.safetensors") == "bfloat16"


def test_the_finished_size_counts_ties_once_and_keeps_integers() -> None:
    assert final_bytes(_MODEL, torch.bfloat16, '{"width": 16}') == 5 * 16 * 2 + 8


def test_own_checkpoints_are_read_directly_if_a_method_can_and_refused_else(own: Path, tmp_path: Path) -> None:
    subject = own_model(own, _MODEL, "{}", "model")
    assert default_methods(subject) == ["naive", "sequential", "meta-sequential", "mmap", "sluice"]
    assert checkpoint_for("naive", subject, tmp_path) == own
    assert list(tmp_path.iterdir()) == [own]
    for method in ("safetensors-load-file", "accelerate", "per-parameter"):  # a format, a key, and one file for each
        with pytest.raises(sluice.UnsupportedError, match=f"{method} does not read this checkpoint.*sluice convert"):
            checkpoint_for(method, subject, tmp_path)


def test_what_only_sluice_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmark.comparison.kind_of", lambda _: "other")
    subject = own_model(tmp_path / "dcp", _MODEL, "{}", None)
    assert default_methods(subject) == ["sluice"]
    with pytest.raises(sluice.UnsupportedError, match="naive does not read this checkpoint"):
        checkpoint_for("naive", subject, tmp_path)


def _loaded(method: str, checkpoint: Path, dtype: Precision, key: str | None = None) -> nn.Module:
    found = METHODS[method].start(job(method, checkpoint, model=_MODEL, key=key, dtype=dtype, verify=True))()
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("method", ["naive", "sequential", "meta-sequential", "mmap", "sluice"])
def test_the_truth_of_an_own_model_is_what_torch_reads(method: str, own: Path) -> None:
    truth, found = (_loaded(name, own, "bfloat16", "model") for name in ("reference", method))
    assert truth.state_dict()["steps"] == 3
    assert verdict(found) == verdict(truth)


def test_the_truth_finds_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    weights = OrderedDict(Tied().state_dict())
    del weights["head.weight"]
    torch.save(weights, tmp_path / "tied.pth")
    truth = _loaded("reference", tmp_path / "tied.pth", "float32")
    assert torch.equal(truth.state_dict()["head.weight"], weights["embedding.weight"])


@pytest.mark.parametrize(("size", "nbytes"), [("small", 702_480_384), ("large", 3_504_431_104), ("xl", 6_753_416_192)])
def test_final_bytes_are_those_of_gpt2_with_its_masks(size: str, nbytes: int) -> None:
    assert final_bytes(size, torch.float32) == nbytes
    assert final_bytes(size, torch.bfloat16) == nbytes // 2


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPTModel(GPTConfig(vocab_size=11, context_length=8, emb_dim=4, n_heads=2, n_layers=2)).eval()
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 9, 9]])
    with torch.no_grad():
        assert torch.equal(model(one)[:, :2], model(other)[:, :2])
        assert not torch.equal(model(one)[:, 2:], model(other)[:, 2:])


def test_a_checkpoint_in_half_precision_holds_the_random_weights_of_its_names(tmp_path: Path) -> None:
    write_checkpoint(random_state_dict("tiny", torch.bfloat16), tmp_path / "tiny.pth")
    for name, weight in torch.load(tmp_path / "tiny.pth", weights_only=True).items():
        assert torch.equal(weight, random_weight(name, weight.shape).bfloat16()), name


def test_random_weights_differ_by_name_and_never_by_call() -> None:
    shape = torch.Size([64])
    assert torch.equal(random_weight("a.weight", shape), random_weight("a.weight", shape))
    assert not torch.equal(random_weight("a.weight", shape), random_weight("b.weight", shape))
    assert random_weight("norm.scale", shape).mean() > 0.9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("one", 1 << 20), ("two", 5000), ("empty", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def test_a_folder_is_dropped_from_the_cache_and_read_into_it(folder: Path) -> None:
    if not make_cold(folder):
        pytest.skip("this file system keeps its files in memory")
    assert cached_share(folder) == 0
    (folder / "two").read_bytes()
    assert cached_share(folder) == pytest.approx(2 / 258)  # pages
    assert make_warm(folder)
    assert cached_share(folder) == 1


def test_a_file_that_stays_is_not_called_cold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmark.machine._PAUSE_SECONDS", 0)
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)
    make_warm(folder)
    assert not make_cold(folder)


def test_what_is_warm_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_warm(folder)
    monkeypatch.setattr("sluice.benchmark.machine._READINGS", 1)
    monkeypatch.setattr("sluice.benchmark.machine._READ_BYTES", 0)  # a read would not bring pages into the cache
    assert make_warm(folder)
    assert not make_cold(folder) or not make_warm(folder)
