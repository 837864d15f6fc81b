"""Paths, URLs and file objects become sources in one place; local paths that look like URLs stay paths.

File objects are read from their current position, as by ``torch.load(f)``.
"""

from __future__ import annotations

import bz2
import gzip
import io
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem

import sluice
from sluice import CheckpointError, FormatError, SourceChangedError, TruncatedError, UnsupportedError
from sluice.sources.directory import LocalDirectory
from sluice.sources.opening import find_place, refuse_url
from support.oracles import same

Opener = Callable[[Path], BinaryIO]


def memory(path: Path) -> BinaryIO:
    return io.BytesIO(path.read_bytes())


OPENERS = pytest.mark.parametrize(
    "opener",
    [lambda path: path.open("rb"), lambda path: path.open("rb", buffering=0), lambda path: path.open("r+b"), memory],
    ids=["buffered", "raw", "read and write", "memory"],
)


def objects() -> list[Any]:
    base = torch.randn(300, 40)
    return [
        {"a": base, "b": base[3:9]},
        {"step": 3},
        {"w": torch.nn.Parameter(torch.randn(400_000)), "coo": torch.eye(3).to_sparse()},
        {"last": torch.arange(5)},
    ]


def save_all(path: Path, values: list[Any], *, before: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(before)
        for value in values:
            torch.save(value, file, _use_new_zipfile_serialization=False)


@OPENERS
def test_several_objects_one_after_the_other(tmp_path: Path, opener: Opener) -> None:
    path = tmp_path / "many.pth"
    save_all(path, objects())
    with opener(path) as ours, path.open("rb") as theirs:
        for _ in objects():
            expected = torch.load(theirs, weights_only=True)
            if "step" in expected:  # without tensors: not a state dict, but a checkpoint
                with sluice.open(ours) as checkpoint:
                    assert checkpoint.tree == expected
            else:
                assert same(dict(sluice.load_state_dict(ours)), expected)
            assert ours.tell() == theirs.tell()
        assert ours.tell() == path.stat().st_size
        with pytest.raises(TruncatedError, match="where a checkpoint should start") as caught:
            sluice.open(ours)
        assert caught.value.offset == path.stat().st_size


@OPENERS
@pytest.mark.parametrize("start", [0, 1, 4096, 5003])
def test_every_format_at_an_offset_in_the_file(tmp_path: Path, opener: Opener, start: int) -> None:
    value = {"a": torch.randn(70, 30), "b": torch.arange(400_000), "c": torch.randn(30, 70).t()}
    path = tmp_path / "f"
    writers: list[Callable[[BinaryIO], object]] = [
        lambda file: torch.save(value, file),
        lambda file: torch.save(value, file, _use_new_zipfile_serialization=False),
        lambda file: file.write(safetensors.torch.save({name: one.contiguous() for name, one in value.items()})),
    ]
    for write in writers:
        with path.open("wb") as file:
            file.write(os.urandom(start))
            inner = io.BytesIO()
            write(inner)
            file.write(inner.getvalue())
        with opener(path) as stream:
            stream.seek(start)
            with sluice.open(stream) as checkpoint:
                assert torch.equal(checkpoint["a"][3:9].read(), value["a"][3:9])
            assert stream.tell() == path.stat().st_size
            stream.seek(start)
            ours = sluice.load_state_dict(stream)
            assert all(torch.equal(ours[name], one) for name, one in value.items())
            stream.seek(start)
            model = torch.nn.Linear(30, 70, bias=False)
            sluice.load_into(model, stream, rename={"a": "weight"}, strict=False)
            assert torch.equal(model.weight, value["a"])


def test_direct_reads_at_an_offset_in_the_file(tmp_path: Path) -> None:
    value = {"w": torch.randn(20 << 20)}  # large enough for direct reads
    save_all(tmp_path / "f", [value], before=b"x" * 777)
    with (tmp_path / "f").open("rb") as stream:
        stream.seek(777)
        ours = sluice.load_state_dict(stream, page_cache="bypass")
    assert torch.equal(ours["w"], value["w"])


def test_errors_name_the_position_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_all(path, [{"a": torch.ones(3)}], before=b"x" * 1000)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with path.open("rb") as stream:
        stream.seek(1000)
        with pytest.raises(TruncatedError, match="before the end of its last storage") as caught:
            sluice.open(stream)
        assert caught.value.offset == len(content) - 1
        assert caught.value.file == str(path)
        assert stream.tell() == 1000
        stream.seek(5)
        with pytest.raises(FormatError, match="not a recognized checkpoint"):
            sluice.open(stream)


def test_two_zip_files_in_one(tmp_path: Path) -> None:
    """torch uses the directory of the second archive for the first."""
    path = tmp_path / "f"
    with path.open("wb") as file:
        torch.save({"a": torch.ones(3)}, file)
        first = file.tell()
        torch.save({"b": torch.ones(2000)}, file)
    with path.open("rb") as stream:
        with pytest.raises(FormatError):
            sluice.open(stream)
        stream.seek(first)
        assert same(dict(sluice.load_state_dict(stream)), {"b": torch.ones(2000)})


def test_temporary_files() -> None:
    with tempfile.NamedTemporaryFile() as named, tempfile.TemporaryFile() as nameless:
        for file in (named, nameless):
            torch.save({"a": torch.ones(3)}, file)  # still in the buffer of the object
            file.seek(0)
            assert torch.equal(sluice.load_state_dict(file)["a"], torch.ones(3))


def test_a_file_that_was_replaced_since_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "f"
    torch.save({"a": torch.ones(3)}, path)
    with path.open("rb") as stream:
        path.unlink()
        torch.save({"a": torch.zeros(3)}, path)
        assert torch.equal(sluice.load_state_dict(stream)["a"], torch.ones(3))


def test_bytes_that_change_while_they_are_open() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    stream.seek(0)
    with sluice.open(stream) as checkpoint:
        stream.write(b"more")
        with pytest.raises(SourceChangedError, match="stream changed"):
            checkpoint["a"].read()
    with pytest.raises(TruncatedError, match="empty"):
        sluice.open(io.BytesIO())


def test_objects_that_decode_or_cannot_be_positioned() -> None:
    decoding = (gzip.GzipFile(fileobj=io.BytesIO()), bz2.BZ2File(io.BytesIO()), io.TextIOWrapper(io.BytesIO()))
    for stream in (*decoding, 5, None, object()):
        with pytest.raises(TypeError, match=r"io\.BytesIO\(stream\.read\(\)\)"):
            sluice.open(stream)  # type: ignore[arg-type]
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe, pytest.raises(UnsupportedError, match="this is a FIFO"):
        sluice.open(pipe)


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


def test_members_with_equal_titles_are_told_apart() -> None:
    urls = ["http://host/get?file=1", "http://host/get?file=2"]
    assert [member.title for member in find_place(urls).members] == ["http://host/get", "http://host/get (2)"]
    stores = [MemoryFileSystem(skip_instance_cache=True) for _ in range(2)]
    assert len(find_place([sluice.Remote("key", store=store) for store in stores]).members) == 2
    with pytest.raises(ValueError, match="names 'http://host/get' twice"):
        find_place([*urls, urls[0]])
    with pytest.raises(ValueError, match="names 'http://host/get' twice"):
        find_place([*urls, sluice.Remote(urls[0])])


def test_a_long_list_takes_time_in_proportion() -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="names 'x39999' twice"):
        find_place([f"x{number}" for number in (*range(40_000), 39_999)])
    assert time.process_time() - started < 2
