"""A list of files is one checkpoint, for every function that takes a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice._options import Limits
from support.gguf_files import packed, plain, write


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
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    tensor, elements = packed((4, 64))
    write(parts[0], {"a": tensor})
    write(parts[1], {"b": plain(torch.ones(3))})
    with sluice.open(parts) as checkpoint:
        assert (checkpoint.format, list(checkpoint)) == ("gguf-parts", ["a", "b"])
        assert torch.equal(checkpoint["a"].read(), elements)
    with sluice.open(parts[0]) as checkpoint:
        assert (list(checkpoint), checkpoint.path) == (["a", "b"], str(parts[0]))
    parts[1].unlink()
    with pytest.raises(sluice.MissingFileError, match="00002-of-00002"):
        sluice.open(parts[0])


def test_a_list_of_one_path_is_the_path(shards: list[Path]) -> None:
    assert sluice.open([shards[0]]).format == "safetensors"
    assert sluice.open([shards[0].parent]).format == "safetensors-parts"


def test_common_names_are_an_error(shards: list[Path], tmp_path: Path) -> None:
    torch.save({"bias": torch.ones(3), "weight": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(sluice.FormatError, match=r"in two files \(2\)") as caught:
        sluice.open([*shards, tmp_path / "other.pth"])
    for name in ("'weight'", "'bias'", "one.safetensors", "two.bin"):
        assert name in str(caught.value)
    assert caught.value.advice.startswith("These are not the parts of one checkpoint")


def test_missing_files_are_missing_files(shards: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"^x: 2 files of the list do not exist: x, y\."):
        sluice.open(["x", *shards, "y"])
    with pytest.raises(
        sluice.MissingFileError, match=r"^.*on\.safetensors: the file does not exist\. Did you mean"
    ) as one:
        sluice.load_state_dict([shards[1], shards[0].with_name("on.safetensors")])
    assert one.value.file == str(shards[0].with_name("on.safetensors"))


def test_a_list_of_files_has_no_directories(shards: list[Path]) -> None:
    with pytest.raises(sluice.UnsupportedError, match=r"Name files, or pass the directory alone\."):
        sluice.open([shards[0].parent, shards[1]])


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


def test_the_number_of_files_is_bounded(shards: list[Path]) -> None:
    with pytest.raises(sluice.LimitError, match="'files'"):
        sluice.open(shards, limits=Limits(files=1))
