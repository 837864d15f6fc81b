"""Verbs take URLs of every format and layout, by the module of a transport; files next to a remote file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

import sluice
from sluice import MissingFileError, PathEscapeError, Remote, RemoteError, UnsupportedError
from sluice.sources.opening import find_place
from sluice.sources.protocol import Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.remote.directory import SiblingFiles, below
from sluice.sources.remote.protocol import RequestFailedError
from support import oracles
from support.object_stores import put
from support.whole_checkpoints import MAKERS


def _siblings(url: str, has: str = "", refused: tuple[str, ...] = ()) -> tuple[SiblingFiles, list[str]]:
    opened: list[str] = []

    def record(remote: Remote) -> Source:
        opened.append(remote.url)
        if remote.address.endswith(refused):
            raise RemoteError("no", file=remote.address) from RequestFailedError("no", temporary=False, status=403)
        if has and not remote.address.endswith(f"/{has}"):
            raise MissingFileError("there is no such file", file=remote.address)
        return MemoryFile(io.BytesIO(b"x"))

    return SiblingFiles(Remote(url, headers={"a": "b"}), record), opened


@pytest.mark.parametrize(
    ("url", "name", "expected"),
    [
        ("https://host/dir/index.json", "x.safetensors", "https://host/dir/x.safetensors"),
        ("https://host/dir/index.json?token=1", "sub/x", "https://host/dir/sub/x?token=1"),
        ("https://host/index.json", "a?b#c%2e", "https://host/a%3Fb%23c%252e"),
        ("s3://bucket/odd?key/index.json", "a b", "s3://bucket/odd?key/a b"),
        ("https://host/dir/my%20index.json?token=1", "my%20index.json", "https://host/dir/my%20index.json?token=1"),
        ("https://host/dir/index.json#/a", "x", "https://host/dir/x"),
    ],
)
def test_siblings_are_opened_by_name(url: str, name: str, expected: str) -> None:
    directory, opened = _siblings(url)
    directory.open(name)
    assert opened == [expected]


@pytest.mark.parametrize(
    "name", ["../x", "/x", "//other/x", "https://other/x", "a/../../x", "a\\..\\x", "", ".", "a//b"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    directory, opened = _siblings("https://host/dir/index.json")
    for check in (directory.open, directory.check_inside):
        with pytest.raises(PathEscapeError, match="leads out of the remote directory"):
            check(name)
    assert not opened


def test_the_usual_names_are_tried_instead_of_a_listing() -> None:
    directory, opened = _siblings("https://me:secret@host/dir/?token=secret", has="pytorch_model.bin")
    assert [(entry.name, entry.kind) for entry in directory.entries()] == [("pytorch_model.bin", "file")]
    assert len(opened) == 4
    directory, _ = _siblings("https://me:secret@host/dir/index.json?token=secret", has="other")
    assert directory.name == "index.json"
    with pytest.raises(UnsupportedError, match=r"^https://host/dir/: the server has no listing of files"):
        list(directory.entries())


def test_a_usual_name_that_is_refused_may_be_missing() -> None:
    """S3 answers 403 for it without the permission to list the bucket."""
    directory, _ = _siblings("https://host/dir/", has="pytorch_model.bin", refused=("model.safetensors", "index.json"))
    assert [entry.name for entry in directory.entries()] == ["pytorch_model.bin"]
    directory, _ = _siblings("https://host/dir/", has="other", refused=("model.safetensors",))
    with pytest.raises(RemoteError, match=r"dir/model\.safetensors: no"):
        list(directory.entries())


def test_files_below_a_directory() -> None:
    assert below(sluice.Remote("https://host/dir?x=1"), "f g").url == "https://host/dir/f%20g?x=1"
    assert below(sluice.Remote("s3://bucket/dir/"), "f").url == "s3://bucket/dir/f"


def _same(tensors: Any, expected: Any) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert oracles.same(tensors[name], tensor), name


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSC) tensor support is in beta", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", MAKERS)
def test_verbs_take_urls_of_every_format(filesystem: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "checkpoint"
    MAKERS[kind](path)
    url = put(filesystem, path, "/bucket/checkpoint")
    with sluice.open(url) as checkpoint, sluice.open(path) as local:
        assert checkpoint.format == local.format
        assert all(file.startswith("memory://bucket/") for file in checkpoint.files)
        assert checkpoint.keys() == local.keys()
        _same({name: tensor.read() for name, tensor in checkpoint.items()}, {k: v.read() for k, v in local.items()})
        for name in {"a.w", "model.a.w"} & local.keys():
            assert oracles.same(checkpoint[name][1:3].read(), local[name][1:3].read())
    assert sluice.verify(url).ok
    assert sluice.diff(url, path).same
    report = sluice.plan(None, url)
    assert report.fits


@pytest.mark.parametrize("kind", ["pth", "shards", "index", "list"])
def test_modules_and_optimizers_are_loaded_from_urls(filesystem: Any, tmp_path: Path, kind: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(8)).sum().backward()
    optimizer.step()
    if kind == "pth":
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f.pth")
        source: Any = put(filesystem, tmp_path / "f.pth", "/f.pth")
        states = source
    else:
        sluice.save(net, tmp_path / "d", format="huggingface", max_shard_size=400)
        torch.save(optimizer.state_dict(), tmp_path / "d" / "optimizer.pt")
        source = states = put(filesystem, tmp_path / "d", "/d")
        if kind == "index":
            source += "/model.safetensors.index.json"
        elif kind == "list":
            source = [f"{source}/{file.name}" for file in sorted((tmp_path / "d").glob("*.safetensors"))]
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    report = sluice.load_into(target, source, device="cpu")
    _same(target.state_dict(), net.state_dict())
    assert not any("directly" in note for note in report.notes)
    filled = torch.optim.AdamW(target.parameters())
    sluice.load_optimizer(filled, states)
    assert torch.equal(filled.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    sluice.convert(source, tmp_path / "out.safetensors")
    _same(sluice.load_state_dict(tmp_path / "out.safetensors"), net.state_dict())


def test_objects_of_fsspec_are_sources(filesystem: Any, tmp_path: Path) -> None:
    sluice.save({"w": torch.arange(6.0)}, tmp_path / "f.safetensors")
    url = put(filesystem, tmp_path / "f.safetensors", "/d/f.safetensors")
    for source in (sluice.Remote("/d", store=filesystem), fsspec.open(url), sluice.Remote(url)):
        _same(sluice.load_state_dict(source), {"w": torch.arange(6.0)})
    with fsspec.open(f"simplecache::{url}", simplecache={"cache_storage": str(tmp_path / "cache")}) as stream:
        _same(sluice.load_state_dict(stream), {"w": torch.arange(6.0)})


def test_options_of_mapped_and_cached_pages_are_answered_by_name(filesystem: Any, tmp_path: Path) -> None:
    sluice.save(nn.Linear(4, 4), tmp_path / "f.safetensors")
    url = put(filesystem, tmp_path / "f.safetensors", "/f.safetensors")
    with torch.device("meta"):
        mapped, bypassing = nn.Linear(4, 4), nn.Linear(4, 4)
    notes = sluice.load_into(mapped, url, device="cpu", place="map").notes
    assert any("2 in a file that the system cannot map" in note for note in notes)
    notes = sluice.load_into(bypassing, url, device="cpu", page_cache="bypass").notes
    assert any("page_cache='bypass' has no effect" in note for note in notes)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "fsspec.core", raising=False)
    monkeypatch.delitem(sys.modules, "sluice.sources.remote.fsspec_files", raising=False)
    for opening in (lambda url: find_place(url).open_file(), lambda url: find_place(url).directory(), sluice.open):
        with pytest.raises(sluice.UnsupportedError, match=r"need the library fsspec.* pip install 'sluice\[remote\]'"):
            opening("ftp://me:secret@host/f")


def test_files_are_tuned_also_in_directories(filesystem: Any) -> None:
    filesystem.pipe_file("/d/f", b"x")
    assert find_place(sluice.Remote("memory://d/f", connections=5)).open_file().access.parallel_requests == 5
    directory = find_place(sluice.Remote("memory://d", connections=5)).directory()
    assert directory is not None
    assert directory.open("f").access.parallel_requests == 5


def test_file_urls_are_paths(tmp_path: Path) -> None:
    sluice.save({"w": torch.zeros(3)}, tmp_path / "a b.safetensors")
    with sluice.open(f"file://{tmp_path}/a%20b.safetensors") as checkpoint:
        assert checkpoint.files == (str(tmp_path / "a b.safetensors"),)


def test_a_url_in_a_pathlib_path_is_explained() -> None:
    with pytest.raises(sluice.MissingFileError, match="pass URLs as str"):
        sluice.open(Path("s3://bucket/model.pth"))
