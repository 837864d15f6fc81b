"""Paths, URLs and file objects become sources in one place; local paths that look like URLs stay paths."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

import sluice
from sluice import CheckpointError, TruncatedError, UnsupportedError
from sluice.sources.directory import LocalDirectory
from sluice.sources.opening import find_place, refuse_url


@pytest.mark.parametrize(
    "url",
    ["https://host/model.safetensors", "s3://bucket/key", "hf://org/model/", "file:///tmp/f", "gs://b/x.index.json"],
)
def test_urls_are_refused_where_a_path_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The error does not claim that a file is missing, and it does not show credentials."""
    monkeypatch.chdir(tmp_path)
    signed = url.replace("://", "://me:secret@", 1) + "?signature=secret#secret"
    with pytest.raises(UnsupportedError, match="a local path is needed here, not a URL") as caught:
        refuse_url(signed)
    assert caught.value.file == url
    assert "Download the checkpoint first and pass its local path." in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "not exist" not in str(caught.value)
    stores = url.startswith(("s3:", "gs:"))  # can be written, but not a manifest to them
    for path, manifest in [("x.pt", signed)] if stores else [(signed, None), ("x.pt", signed)]:
        with pytest.raises(UnsupportedError, match=r"Write to a local path, then copy the files\."):
            sluice.save({}, path, manifest=manifest)
    assert not list(tmp_path.iterdir())


def test_local_paths_win_over_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data:").mkdir()
    sluice.save({}, "data:/f.safetensors")
    (tmp_path / "data:" / "link").symlink_to("nowhere")
    with closing(find_place("data://f.safetensors").open_file()) as source:
        assert source.path == "data://f.safetensors"
    assert len(sluice.open("data://f.safetensors")) == 0
    assert isinstance(find_place("data://").directory(), LocalDirectory)
    with pytest.raises(CheckpointError, match="does not exist"):
        find_place("data://link").open_file()  # a link that leads nowhere is a local path, too


@pytest.mark.parametrize("path", ["C:\\x", "C://x", "://x", "a:b", "no such://file", "1://x", "x:/y"])
def test_odd_paths_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        find_place(path).open_file()
    assert caught.value.file == path
    assert find_place(path).directory() is None


def test_directories_and_their_members(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(b"x")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("empty")
    os.mkfifo(tmp_path / "pipe")
    directory = find_place(tmp_path).directory()
    assert directory is not None
    kinds = {entry.name: entry.kind for entry in directory.entries()}
    assert kinds == {"sub": "directory", "empty": "file", "link": "link", "pipe": "special"}
    assert directory.open("sub/f").path == str(tmp_path / "sub" / "f")
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        directory.open("none")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(TruncatedError):
        directory.open("empty")
    assert find_place(tmp_path / "empty").directory() is None


def test_links_out_of_a_directory_are_found_at_any_depth(tmp_path: Path) -> None:
    inner = tmp_path / "d"
    (inner / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"x")
    (inner / "sub" / "f").symlink_to("../../outside")
    (inner / "up").symlink_to("..")
    (inner / "same").symlink_to("sub")
    directory = LocalDirectory(str(inner))
    for name in ("sub", "same/none", "sub/../none"):
        directory.check_inside(name)
    for name in ("sub/f", "up/outside", "same/f", "../outside"):
        with pytest.raises(sluice.PathEscapeError, match="symbolic link leads out") as caught:
            directory.check_inside(name)
        assert caught.value.file == os.path.join(inner, name)
        assert caught.value.found == str((tmp_path / "outside").resolve())


def test_the_parent_of_a_bare_name_is_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_bytes(b"x")
    place = find_place("f")
    directory = place.parent()
    assert place.name == "f"
    assert directory.open(place.name).path == "f"
    directory.check_inside(place.name)


def test_what_is_not_a_file_is_named_and_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nowhere")
    Path("none").mkdir()
    says = {
        os.devnull: "this is a character device, not a regular file",
        "link": "does not exist. It is a symbolic link to 'nowhere', which does not exist",
        "none": "found nothing. Pass the path of a checkpoint file, or of the directory that holds its files",
    }
    for path, sentence in says.items():
        with pytest.raises(CheckpointError) as caught:
            sluice.open(path)
        assert sentence in str(caught.value)
        assert "damaged" not in str(caught.value)
