"""Refused conversions write nothing, and failed ones leave the destination as before."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice import Limits, MemoryLimits
from support import distributed
from support.directories import contents, write_parameters
from support.oracles import same
from support.system_calls import Injection, failing


@pytest.mark.parametrize(
    ("value", "name", "error", "problem"),
    [
        ({"a": torch.ones(2), "args": argparse.Namespace(x=1)}, "o.pt", sluice.UnsafeContentError, "only running code"),
        (
            {"a": torch.ones(2), "calls": {nn.Linear: {}}},
            "o.pt",
            sluice.UnsafeContentError,
            "tensor 'torch.nn.*running code",
        ),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "o.safetensors", sluice.SaveError, "support this dtype"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "o.safetensors", sluice.FormatError, "same dotted name"),
        ({b"raw": torch.ones(1), "w": torch.ones(9)}, "o.safetensors", sluice.MismatchError, "strings, not bytes"),
        ({"__metadata__": torch.ones(1)}, "o.safetensors", sluice.SaveError, "safetensors reserves this name"),
        (torch.ones(3), "o.safetensors", sluice.MismatchError, "no state dict"),
        (
            {"a": torch.zeros(1).expand(1 << 20, 1 << 20)},
            "o.safetensors",
            sluice.LimitError,
            "views of shared bytes would be written in full",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_made(
    tmp_path: Path, value: object, name: str, error: type[sluice.SluiceError], problem: str
) -> None:
    torch.save(value, tmp_path / "in.pt")
    (tmp_path / "o.pt").write_bytes(b"old")
    before = contents(tmp_path)
    with pytest.raises(error, match=problem):
        sluice.convert(tmp_path / "in.pt", tmp_path / name, overwrite=True)
    assert contents(tmp_path) == before


def test_expanded_tensors_stay_small_in_a_torch_file(tmp_path: Path) -> None:
    torch.save({"a": torch.full((1,), 3.0).expand(1 << 20, 1 << 20)}, tmp_path / "in.pt")
    sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["a"]
    assert found.shape == (1 << 20, 1 << 20)
    assert float(found[7, 7]) == 3.0
    assert (tmp_path / "out.pt").stat().st_size < 3000


def test_overlapping_views_within_the_limit_are_written_out(tmp_path: Path) -> None:
    state = {"windows": torch.arange(20.0).unfold(0, 5, 1), "wide": torch.randn(1, 7).expand(9, 7)}
    torch.save(state, tmp_path / "in.pt")
    sluice.convert(tmp_path / "in.pt", tmp_path / "o.safetensors")
    found = safetensors.torch.load_file(tmp_path / "o.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    more = 4 * (16 * 5 - 20) + 4 * (9 * 7 - 7)
    expected = rf"at most {more - 1} bytes more \(repeated_bytes\); found {more} bytes"
    with pytest.raises(sluice.LimitError, match=expected):
        sluice.convert(tmp_path / "in.pt", tmp_path / "p.safetensors", limits=Limits(repeated_bytes=more - 1))
    sluice.convert(tmp_path / "in.pt", tmp_path / "p.safetensors", limits=Limits(repeated_bytes=more))


def test_a_file_may_become_itself(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, 30), "v": torch.randn(7).double()}
    torch.save(state, tmp_path / "m.pt")
    (tmp_path / "link.pt").symlink_to("m.pt")
    with pytest.raises(sluice.SaveError, match="already exists"):
        sluice.convert(tmp_path / "m.pt", tmp_path / "link.pt")
    sluice.convert(tmp_path / "m.pt", tmp_path / "link.pt", dtype=torch.float16, overwrite=True)
    assert (tmp_path / "link.pt").is_symlink()
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert same(found, {name: tensor.half() for name, tensor in state.items()})


@pytest.mark.parametrize("second", [None, 700, 300])
def test_a_model_directory_may_become_itself(tmp_path: Path, second: int | None) -> None:
    state = {f"w{i}": torch.randn(10, 10) for i in range(6)}
    sluice.save(state, tmp_path / "m", max_shard_size=500)
    with pytest.raises(sluice.SaveError, match="already contains a model"):
        sluice.convert(tmp_path / "m", tmp_path / "m", max_shard_size=second)
    sluice.convert(tmp_path / "m", tmp_path / "m", max_shard_size=second, overwrite=True, dtype=torch.bfloat16)
    found = sluice.load_state_dict(tmp_path / "m")
    assert same(dict(found), {name: tensor.bfloat16() for name, tensor in state.items()})
    assert not [name for name in os.listdir(tmp_path / "m") if name.startswith(".")]


def in_shards(path: Path) -> Path:
    sluice.save({f"w{i}": torch.randn(10, 10) for i in range(4)}, path / "in", max_shard_size=500)
    return path / "in"


def in_parameters(path: Path) -> Path:
    return write_parameters(path / "in", {f"w{i}": torch.randn(3) for i in range(4)})


def in_chunks(path: Path) -> Path:
    return distributed.write(path / "in", {"w": distributed.rows(torch.randn(4, 4), 2)})


IS_A_SOURCE, IS_INSIDE = "one of the source files", "inside the source directory"


@pytest.mark.parametrize(
    ("make", "inside", "kind", "problem"),
    [
        (in_shards, "model-00001-of-00004.safetensors", None, IS_A_SOURCE),
        (in_shards, "other.safetensors", None, IS_INSIDE),
        (in_shards, "deeper/er", "huggingface", IS_INSIDE),
        (in_parameters, "w0.pt", None, IS_A_SOURCE),
        (in_parameters, "", "huggingface", IS_INSIDE),
        (in_chunks, "", "huggingface", IS_INSIDE),
        (in_chunks, "out.pt", None, IS_INSIDE),
    ],
)
def test_a_destination_in_the_source_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], inside: str, kind: Any, problem: str
) -> None:
    source = make(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "alias").symlink_to(source)
    for directory in (source, tmp_path / "alias"):
        with pytest.raises(sluice.SaveError, match=problem):
            sluice.convert(source, directory / inside, format=kind, overwrite=True)
    (tmp_path / "alias").unlink()
    assert contents(tmp_path) == before
    sluice.convert(source, tmp_path / "in2")  # only the start of its name is that of the source


def test_a_shard_is_not_replaced_by_a_conversion_of_all_shards(tmp_path: Path) -> None:
    source = in_shards(tmp_path)
    with pytest.raises(sluice.SaveError, match="the destination is one of the source files"):
        sluice.convert(
            source / "model.safetensors.index.json", source / "model-00001-of-00004.safetensors", overwrite=True
        )


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "model"])
@pytest.mark.parametrize("call", ["preadv", "pwrite", "fsync"])
def test_a_failing_system_call_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    state = {"w": torch.randn(3, 5).t(), "v": torch.randn(9)}
    torch.save(state, tmp_path / "in.pt")
    sluice.convert(tmp_path / "in.pt", tmp_path / name)
    before = contents(tmp_path)
    torch.save({key: tensor + 1 for key, tensor in state.items()}, tmp_path / "in.pt")
    before["in.pt"] = (tmp_path / "in.pt").read_bytes()
    with sluice.open(tmp_path / "in.pt") as checkpoint, monkeypatch.context() as patch:
        if call == "preadv":
            Injection(patch, failing(errno.EIO))
        else:
            patch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(sluice.ReadError if call == "preadv" else sluice.SaveError):
            sluice.convert(checkpoint, tmp_path / name, overwrite=True)
    assert contents(tmp_path) == before


def test_a_source_that_changes_fails_the_suite(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(1_000_000)}, tmp_path / "in.pt")

    def touch(_: sluice.ProgressEvent) -> None:
        os.utime(tmp_path / "in.pt", (1, 1))

    with pytest.raises(sluice.SourceChangedError):
        sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt", progress=touch, memory=MemoryLimits(staging="2MiB"))
    assert not (tmp_path / "out.pt").exists()


def test_memory_limits(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(1000)}, tmp_path / "in.pt")
    with pytest.raises(sluice.BudgetError, match="the conversion needs"):
        sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt", memory=MemoryLimits(host="32MiB"))
    with pytest.raises(sluice.BudgetError, match="staging is too small"):
        sluice.convert(tmp_path / "in.pt", tmp_path / "out.pt", memory=MemoryLimits(staging="1MiB"))
    assert not (tmp_path / "out.pt").exists()


def test_a_dry_run_reports_the_files_and_writes_nothing(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(10, 10) for i in range(6)}
    torch.save(state, tmp_path / "in.pt")
    before = contents(tmp_path)
    for name in ("o.pt", "o.safetensors", "model"):
        how: dict[str, Any] = {"max_shard_size": 900 if name == "model" else None}
        manifest = tmp_path / "manifest.json"
        dry = sluice.convert(
            tmp_path / "in.pt", tmp_path / name, dtype=torch.bfloat16, dry_run=True, manifest=manifest, **how
        )
        assert contents(tmp_path) == before
        assert dry.dry_run
        assert str(dry).startswith("would write 6 of 6 tensors of ")
        wet = sluice.convert(tmp_path / "in.pt", tmp_path / name, dtype=torch.bfloat16, **how)
        assert (dry.files, dry.file_bytes, dry.casts) == (wet.files, wet.file_bytes, wet.casts)
        again = sluice.convert(tmp_path / "in.pt", tmp_path / name, dtype=torch.bfloat16, dry_run=True, **how)
        assert set(again.replaced) <= set(wet.files)
        assert again.replaced
        for file in wet.files:
            os.unlink(file)
        before = contents(tmp_path)
