"""Manifests of saves: hashes, names, and the time at which the file appears."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import sluice
from sluice import _defaults as defaults
from sluice.formats.manifest import HashAlgorithm, Manifest, TensorHash, parse_manifest, read_manifest
from sluice.writing.manifest import ManifestWriter
from sluice.writing.safetensors import TensorOutline
from support.oracles import bits

HASHES: dict[HashAlgorithm, Callable[[bytes], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def expected(state: dict[str, torch.Tensor], algorithm: HashAlgorithm = "sha256") -> Manifest:
    return Manifest(
        algorithm=algorithm,
        tensors={
            name: TensorHash(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                hash=HASHES[algorithm](bits(tensor.resolve_conj().resolve_neg())).hexdigest(),
            )
            for name, tensor in state.items()
        },
    )


def states() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8)
    return {
        "whole": base,
        "row": base[2],
        "rows": base[1:4],
        "transposed": base.t(),
        "strided": base[::2, 1:7:3],
        "none": base[:0],
        "alone": torch.randn(3, 5, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "ints": torch.arange(7),
        "e4m3": torch.arange(5).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("staging", [1, 40, 1 << 20])
@pytest.mark.parametrize("to", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["f.pth", "f.safetensors", "directory", "sharded"])
def test_a_manifest_describes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: torch.dtype | None, staging: int
) -> None:
    monkeypatch.setattr(defaults, "SAVE_STAGING_BYTES", staging)
    state = states()
    limit = 200 if name == "sharded" else None
    sluice.save(state, tmp_path / name, dtype=to, manifest=tmp_path / "m.json", max_shard_size=limit)
    finished = {key: tensor.to(to) if to and tensor.is_floating_point() else tensor for key, tensor in state.items()}
    manifest = read_manifest(str(tmp_path / "m.json"), sluice.Limits())
    assert manifest == expected(finished)
    with sluice.open(tmp_path / name) as checkpoint:
        again = {key: tensor.read() for key, tensor in checkpoint.items()}
    assert expected(again) == manifest


@pytest.mark.parametrize("algorithm", HASHES)
def test_ties_and_nested_states_have_the_names_that_open_shows(tmp_path: Path, algorithm: HashAlgorithm) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "tied": [model.weight, (model.weight,)],
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }
    sluice.save(state, tmp_path / "f.pt", manifest=tmp_path / "m.json", manifest_hash=algorithm)
    with sluice.open(tmp_path / "f.pt") as checkpoint:
        read = {name: tensor.read() for name, tensor in checkpoint.items()}
    assert {"model.weight", "tied.0", "tied.1.0", "optimizer.state.0.exp_avg"} <= set(read)
    assert read_manifest(str(tmp_path / "m.json"), sluice.Limits()) == expected(read, algorithm)


def test_a_manifest_can_lie_in_the_model_directory(tmp_path: Path) -> None:
    for _ in range(2):
        path = tmp_path / "m" / "model.manifest.json"
        sluice.save(states(), tmp_path / "m", manifest=path, max_shard_size=200, overwrite=True)
        assert set(read_manifest(str(path), sluice.Limits()).tensors) == set(sluice.load_state_dict(tmp_path / "m"))
    assert not [path for path in (tmp_path / "m").iterdir() if "partial" in path.name]
    sluice.save(states(), tmp_path / "above" / "hf", manifest=tmp_path / "above" / "m.json", format="huggingface")


@pytest.mark.parametrize(
    ("name", "manifest", "algorithm", "error", "problem"),
    [
        ("f.pt", "kept.json", "sha256", sluice.SaveError, r"kept\.json.* already exists"),
        ("f.pt", "nowhere/m.json", "sha256", sluice.SaveError, "directory of the manifest does not exist"),
        ("hf/", "nowhere/m.json", "sha256", sluice.SaveError, "directory of the manifest does not exist"),
        ("f.pt", "x/../f.pt", "sha256", ValueError, "would replace a file"),
        ("f.pt", "m.json", "md5", ValueError, "unknown hash 'md5': one of sha256, xxh3_128"),
        ("f.pt", "m.json", "xxh3_128", ImportError, r"pip install 'sluice\[hash\]'"),
    ],
)
def test_what_is_refused_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    manifest: str,
    algorithm: HashAlgorithm,
    error: type[Exception],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "xxhash", None)  # it is not installed
    Path("kept.json").write_text("mine", encoding="utf-8")
    with pytest.raises(error, match=problem):
        sluice.save(states(), name, manifest=manifest, manifest_hash=algorithm)
    assert os.listdir() == ["kept.json"]
    assert Path("kept.json").read_text(encoding="utf-8") == "mine"


def test_it_appears_after_the_data_and_not_without_it(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(event: sluice.ProgressEvent) -> None:
        seen.append((tmp_path / "m.json").exists())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sluice.save(states(), tmp_path / "f.pt", manifest=tmp_path / "m.json", progress=look)
    assert seen == [False]
    assert not list(tmp_path.iterdir())


def test_names_that_a_manifest_cannot_tell_apart_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(sluice.SaveError, match="a manifest needs unique names") as refused:
        sluice.save(state, tmp_path / "f.pt", manifest=tmp_path / "m.json")
    assert refused.value.tensor == "a.b"
    circle: dict[str, object] = {}
    circle["again"] = circle
    with pytest.raises(sluice.SaveError, match="nested deeper than sluice reads; expected 64"):
        sluice.save(circle, tmp_path / "f.pt", manifest=tmp_path / "m.json")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_manifest_alone_states_that_the_data_is_saved(tmp_path: Path) -> None:
    gone, target = tmp_path / "gone", tmp_path / "f.pt"
    gone.mkdir()
    with pytest.raises(sluice.SaveError, match=r"manifest was not written, the checkpoint is complete: .*No such file"):
        sluice.save(states(), target, manifest=gone / "m.json", progress=lambda _: rmtree(gone, ignore_errors=True))
    assert [path.name for path in tmp_path.iterdir()] == ["f.pt"]


def test_a_tensor_whose_bytes_were_not_written_is_not_in_the_manifest(tmp_path: Path) -> None:
    manifest = ManifestWriter(tmp_path / "m.json", "sha256", overwrite=True)
    manifest.expect("w", TensorOutline("uint8", (3,)))
    take = manifest.consumer("w")
    assert take
    take(memoryview(b"ab"))
    with pytest.raises(sluice.SaveError, match="was not hashed completely"):
        manifest.commit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00004.safetensors"]
)
@pytest.mark.parametrize("old", [True, False])
def test_a_manifest_replaces_no_file_of_a_model(tmp_path: Path, name: str, old: bool) -> None:
    whole, shards = None, 500
    state, hf = {f"layer.{number}": torch.ones(100) for number in range(4)}, tmp_path / "hf"
    sluice.save(state, hf, max_shard_size=shards if old else whole)
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    with pytest.raises(ValueError, match="would replace a file or the index of a checkpoint"):
        sluice.save(state, hf, manifest=hf / name, overwrite=True, max_shard_size=whole if old else shards)
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before


@pytest.mark.parametrize("form", [{"max_shard_size": 200}, {"format": "dcp"}], ids=["shards", "dcp"])
def test_a_manifest_replaces_no_index(tmp_path: Path, form: dict[str, Any]) -> None:
    sluice.save(states(), tmp_path / "d", **form)
    (index,) = (path for path in (tmp_path / "d").iterdir() if path.name.endswith((".json", ".metadata")))
    for write in (partial(sluice.convert, tmp_path / "d"), partial(sluice.save, states())):
        with pytest.raises(ValueError, match=r"would replace a file or the index of a checkpoint"):
            write(tmp_path / "o.pt", manifest=index, overwrite=True)
    assert set(sluice.load_state_dict(tmp_path / "d")) == set(states())


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_manifest_replaces_neither_source_nor_result_of_a_conversion(tmp_path: Path, dry_run: bool) -> None:
    sluice.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    for name, out in (("a.pt", "b.pt"), ("b.pt", "b.pt"), ("hf/model.safetensors", "hf")):
        with pytest.raises(ValueError, match=r"would replace a file"):
            sluice.convert(tmp_path / "a.pt", tmp_path / out, manifest=tmp_path / name, overwrite=True, dry_run=dry_run)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert set(torch.load(tmp_path / "a.pt")) == {"a"}


GOOD = {"format": "sluice-manifest", "version": 1, "algorithm": "sha256", "tensors": {}}
TENSOR = {"dtype": "float32", "shape": [2], "hash": "00"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not strict JSON"),
        (b"[" * 100_000, "not strict JSON"),
        (b"[]", "not strict JSON"),
        (b'{"weight_map": {}}', "not a manifest"),
        (GOOD | {"version": 2}, "unsupported manifest version; expected 1; found 2"),
        (GOOD | {"version": True}, "expected types"),
        (
            GOOD | {"algorithm": "md5"},
            "unknown hash algorithm .*; expected one of sha256, xxh3_128; found md5",
        ),
        (GOOD | {"algorithm": ["sha256"]}, "expected types"),
        (GOOD | {"tensors": [1]}, "Expected `object`, got `array` - at `.*tensors`"),
        (GOOD | {"tensors": {"a": TENSOR | {"shape": [-1]}}}, "Expected `int` >= 0"),
        (GOOD | {"tensors": {"a": TENSOR | {"shape": [True]}}}, "expected types"),
        (GOOD | {"tensors": {"a": {"dtype": "float32", "shape": []}}}, "missing required field `hash`"),
        (json.dumps(GOOD | {"tensors": {"a": TENSOR, "b": TENSOR}}).replace('"b"', '"a"').encode(), "given twice"),
        (GOOD | {"tensors": {"a": TENSOR, "b": TENSOR, "c": TENSOR}}, "entries.*at most 2"),
    ],
    ids=range(14),
)
def test_files_that_are_not_a_manifest_are_refused(content: bytes | dict[str, object], problem: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(sluice.CheckpointError, match=problem):
        parse_manifest(data, "m.json", sluice.Limits(entries=2))


def test_a_manifest_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(GOOD), encoding="utf-8")
    with pytest.raises(sluice.LimitError, match="exceeds the limit 'header_bytes'; expected at most 9"):
        read_manifest(str(tmp_path / "m.json"), sluice.Limits(header_bytes=9))


def test_a_layout_is_kept() -> None:
    one = TensorHash(dtype="float32", shape=(2, 3), layout="sparse_coo", hash="ab")
    manifest = Manifest(algorithm="sha256", tensors={'a"\n\u00e4': one})
    assert parse_manifest(manifest.encode(), "m.json", sluice.Limits()) == manifest
