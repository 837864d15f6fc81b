"""The GPT-2-shaped model and its checkpoints, and files in the page cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from sluice.benchmark.gpt2 import (
    CheckpointFormat,
    GPTConfig,
    GPTModel,
    config,
    gpt2,
    make_checkpoint,
    random_weight,
)
from sluice.benchmark.machine import cached_share, make_cold, make_warm
from sluice.benchmark.methods import final_bytes

_BOOK_BLOCK = {
    *(f"att.{layer}.{kind}" for layer in ("W_query", "W_key", "W_value", "out_proj") for kind in ("weight", "bias")),
    "att.mask",
    *(f"ff.layers.{position}.{kind}" for position in (0, 2) for kind in ("weight", "bias")),
    *(f"{norm}.{kind}" for norm in ("norm1", "norm2") for kind in ("scale", "shift")),
}

_BOOK_REST = {"tok_emb.weight", "pos_emb.weight", "final_norm.scale", "final_norm.shift", "out_head.weight"}


def _small_config(**changes: Any) -> GPTConfig:
    values = {"vocab_size": 11, "context_length": 8, "emb_dim": 4, "n_heads": 2, "n_layers": 2, **changes}
    return cast("GPTConfig", values)


def test_its_names_are_those_of_the_book() -> None:
    names = set(GPTModel(_small_config(qkv_bias=True)).state_dict())
    assert names == _BOOK_REST | {f"trf_blocks.{block}.{name}" for block in (0, 1) for name in _BOOK_BLOCK}
    assert "trf_blocks.0.att.W_query.bias" not in GPTModel(_small_config()).state_dict()


@pytest.mark.parametrize(("size", "nbytes"), [("small", 702_480_384), ("large", 3_504_431_104), ("xl", 6_753_416_192)])
def test_final_bytes_are_those_of_gpt2_with_its_masks(size: str, nbytes: int) -> None:
    assert final_bytes(size, torch.float32) == nbytes
    assert final_bytes(size, torch.bfloat16) == nbytes // 2


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPTModel(_small_config()).eval()
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 9, 9]])
    with torch.no_grad():
        assert torch.equal(model(one)[:, :2], model(other)[:, :2])
        assert not torch.equal(model(one)[:, 2:], model(other)[:, 2:])


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match="unknown GPT-2 size 'huge'; expected one of tiny, small"):
        config("huge")


def _read(path: Path, kind: CheckpointFormat) -> dict[str, torch.Tensor]:
    if kind == "per-parameter":
        return {file.stem: torch.load(file, weights_only=True) for file in path.iterdir()}
    if kind == "safetensors":
        return load_file(path)
    return cast("dict[str, torch.Tensor]", torch.load(path, weights_only=True))


@pytest.mark.parametrize("kind", ["torch", "safetensors", "per-parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_holds_the_random_weights_of_its_names(
    tmp_path: Path, kind: CheckpointFormat, dtype: torch.dtype
) -> None:
    path = tmp_path / "checkpoint"
    make_checkpoint(path, "tiny", dtype, kind)
    with torch.device("meta"):
        wanted = {name: weight.shape for name, weight in gpt2("tiny").state_dict().items()}
    found = _read(path, kind)
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert torch.equal(weight, random_weight(name, wanted[name]).to(dtype)), name


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
    assert make_warm(folder)
    assert cached_share(folder) == 1


def test_the_share_counts_pages(folder: Path) -> None:
    if not make_cold(folder):
        pytest.skip("this file system keeps its files in memory")
    (folder / "two").read_bytes()
    assert cached_share(folder) == pytest.approx(2 / 258)


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
