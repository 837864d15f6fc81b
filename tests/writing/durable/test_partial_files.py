"""Names of partial files, and recognition of leftovers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice._errors import SaveError
from sluice.writing.durable.partial_files import hidden_path, hidden_stem, saving


@pytest.mark.parametrize("name", ["model.pt", ".hidden", "a b\n.c", "ü.safetensors"])
@pytest.mark.parametrize("in_set", [False, True])
def test_a_hidden_path_contains_its_final_name(tmp_path: Path, name: str, *, in_set: bool) -> None:
    path = hidden_path(str(tmp_path), name, in_set=in_set)
    assert os.path.dirname(path) == str(tmp_path)
    assert path != hidden_path(str(tmp_path), name, in_set=in_set)
    assert hidden_stem(os.path.basename(path), in_set=in_set) == name
    assert hidden_stem(os.path.basename(path), in_set=not in_set) is None
    assert hidden_stem(name, in_set=in_set) is None


def test_a_long_name_is_shortened_to_what_file_systems_take(tmp_path: Path) -> None:
    name = "ü" * 127
    path = hidden_path(str(tmp_path), name, in_set=True)
    Path(path).touch()
    stem = hidden_stem(os.path.basename(path), in_set=True)
    assert stem
    assert name.startswith(stem)


def test_errors_of_the_system_are_save_errors() -> None:
    with pytest.raises(SaveError, match=r"m\.pt: the operating system refused: No such file") as caught, saving("m.pt"):
        os.stat("/does/not/exist")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
