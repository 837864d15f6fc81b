"""Checkpoints opened through a directory, also of an object store, and from lists of files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice._options import Limits
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.checkpoint.opening import _parts
from sluice.sources.directory import LocalDirectory
from support import distributed
from support.directories import Tensors, refusal, tensors, two_shards, write_model, write_parameters, write_shards
from support.gguf_files import packed, plain, write
from support.object_stores import put
from support.watching import watch


def write_chunks(path: Path, content: Tensors) -> None:
    distributed.write(path, {name: distributed.rows(tensor, 3) for name, tensor in content.items()})


@pytest.mark.parametrize("write", [write_shards, write_parameters, write_model, write_chunks])
def test_links_that_lead_out_are_followed_unless_the_limits_forbid_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Tensors], object]
) -> None:
    content, strict, outside = tensors("a.w", "a.b", "c", "b.w"), Limits(symlinks_outside=False), tmp_path / "outside"
    directory = tmp_path / "d"
    directory.mkdir()
    write(directory, content)
    opened: list[str] = []
    watch(monkeypatch, LocalDirectory, "open", lambda _, name: opened.append(name))
    sluice.open(directory, limits=strict).close()
    for name in opened.copy():
        (directory / name).rename(outside)
        (directory / name).symlink_to(outside)
        with sluice.open(directory) as checkpoint:
            assert checkpoint.keys() == content.keys()
        opened.clear()
        assert refusal(directory, sluice.PathEscapeError, limits=strict).file == str(directory / name)
        assert name not in opened
        outside.replace(directory / name)


def test_a_missing_object_is_reported_as_a_missing_file(filesystem: Any, tmp_path: Path) -> None:
    first, second = two_shards(tmp_path)
    second.unlink()
    url = put(filesystem, tmp_path, "/d")
    error = refusal(url, sluice.IncompleteCheckpointError, f"'{second.name}'")
    assert error.file == f"{url}/model.safetensors.index.json"
    assert f"'{first.name}'" not in error.problem


def test_divided_states_are_recognized_in_any_directory(filesystem: Any) -> None:
    filesystem.pipe({"/d/distrib_optim.pt": b"x", "/e/latest": b"x", "/e/global_step7/f": b"x"})
    assert "Megatron" in str(refusal("memory://d", sluice.UnsupportedError))
    assert "such as 'global_step7'" in str(refusal("memory://e", sluice.FormatError))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two parts in different directories, one for each format."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save_file({"weight": torch.arange(12.0).reshape(3, 4)}, tmp_path / "a" / "one.safetensors")
    torch.save({"bias": torch.ones(3)}, tmp_path / "b" / "two.bin")
    return [tmp_path / "a" / "one.safetensors", tmp_path / "b" / "two.bin"]


def test_the_parts_are_one_checkpoint(shards: list[Path], tmp_path: Path) -> None:
    names = tuple(map(str, shards))
    with sluice.open(shards) as checkpoint:
        assert list(checkpoint) == ["weight", "bias"]
        assert (checkpoint.format, checkpoint.files) == ("torch-parts", names)
        assert checkpoint.path == f"{names[0]} and 1 more file"
    model = torch.nn.Linear(4, 3)
    assert sluice.load_into(model, names).source == f"{names[0]} and 1 more file"
    assert torch.equal(model.weight, torch.arange(12.0).reshape(3, 4))
    sluice.convert(shards, tmp_path / "whole.pth")
    assert sluice.diff(shards, tmp_path / "whole.pth").same
    assert sluice.verify(shards, hashes="sha256").ok
    assert sluice.plan(None, shards).final_bytes == 60
    assert sluice.open(shards, limits=Limits(symlinks_outside=False)).format == "torch-parts"


def test_the_parts_of_a_divided_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "m-00001-of-00002.gguf"  # named as the first part is
    folder.mkdir()
    parts = [folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    tensor, elements = packed((4, 64))
    write(parts[0], {"a": tensor})
    write(parts[1], {"b": plain(torch.ones(3))})
    with sluice.open(parts) as checkpoint:
        assert (checkpoint.format, list(checkpoint)) == ("gguf-parts", ["a", "b"])
        assert torch.equal(checkpoint["a"].read(), elements)
    with sluice.open(parts[0]) as checkpoint:
        assert (list(checkpoint), checkpoint.path) == (["a", "b"], str(parts[0]))
    parts[1].unlink()
    assert "00002-of-00002" in str(refusal(parts[0], sluice.MissingFileError))


def test_the_query_of_a_divided_gguf_file_may_have_its_name() -> None:
    url = "https://h/m-00001-of-00002.gguf/m-00001-of-00002.gguf?name=m-00001-of-00002.gguf"
    last = "https://h/m-00001-of-00002.gguf/m-00002-of-00002.gguf?name=m-00002-of-00002.gguf"
    assert _parts(url, "m-00001-of-00002.gguf", 2) == [url, last]
    assert _parts(sluice.Remote(url), "m-00001-of-00002.gguf", 2)[1] == sluice.Remote(last)


def test_a_list_of_one_path_is_the_path(shards: list[Path]) -> None:
    assert sluice.open([shards[0]]).format == "safetensors"
    assert sluice.open([shards[0].parent]).format == "safetensors-parts"


def test_common_names_are_an_error(shards: list[Path], tmp_path: Path) -> None:
    torch.save({"bias": torch.ones(3), "weight": torch.ones(1)}, tmp_path / "other.pth")
    error = refusal([*shards, tmp_path / "other.pth"], sluice.FormatError, "in two files (2)")
    for name in ("'weight'", "'bias'", "one.safetensors", "two.bin"):
        assert name in str(error)
    assert str(error.advice).startswith("These are not the parts of one checkpoint")


def test_missing_files_are_missing_files(shards: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"^x: 2 files of the list do not exist: x, y\."):
        sluice.open(["x", *shards, "y"])
    with pytest.raises(
        sluice.MissingFileError, match=r"^.*on\.safetensors: the file does not exist\. Did you mean"
    ) as one:
        sluice.load_state_dict([shards[1], shards[0].with_name("on.safetensors")])
    assert one.value.file == str(shards[0].with_name("on.safetensors"))


def test_a_list_of_files_has_no_directories_and_is_bounded(shards: list[Path]) -> None:
    error = refusal([shards[0].parent, shards[1]], sluice.UnsupportedError)
    assert "Name files, or pass the directory alone." in str(error)
    assert "'files'" in str(refusal(shards, sluice.LimitError, limits=Limits(files=1)))


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([], ValueError, "source is an empty list"),
        (["x", "y", "x"], ValueError, "a list that names 'x' twice"),
        (["x", 3], TypeError, "a list with an int; a list holds paths of files"),
        (["x", b"y"], TypeError, "a list with bytes"),
    ],
)
def test_wrong_lists(paths: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sluice.open(paths)


def test_metadata_of_other_writers_never_becomes_a_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {"format": "pt", "head": "pt", "pt": "head", "author": "unknown"}
    save_file({"pt": torch.arange(3.0)}, path, metadata)
    with closing(OpenCheckpoint.open(path)) as opened:
        assert opened.stored_names == {"head": "pt"}
    sluice.convert(path, tmp_path / "model.pt")
    converted = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(converted) == ["pt"] == list(sluice.load_state_dict(path))
    sluice.convert(path, tmp_path / "again.safetensors")
    with sluice.open(tmp_path / "again.safetensors") as again:
        assert again.metadata == metadata
    torch.save({"pt": torch.arange(3.0), "format": torch.arange(3.0)}, tmp_path / "other.pt")
    report = sluice.diff(path, tmp_path / "other.pt")
    assert "format" in {*report.tied, *(each.name for each in report.differences)}
