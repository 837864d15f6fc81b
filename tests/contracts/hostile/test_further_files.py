"""Further hostile files of each family: opening raises one typed error that describes the problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sluice
from support.hostile_files import CASES


@pytest.mark.parametrize("case", CASES)
def test_further_files(tmp_path: Path, case: str) -> None:
    content, kind, words = CASES[case]
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(kind, match=words) as caught:
        sluice.open(tmp_path / "f")
    assert type(caught.value) is kind
    assert caught.value.file == str(tmp_path / "f")


@pytest.mark.parametrize("name", [".", "./m.safetensors", "m.safetensors/", "x\0y", "C:x", "m.safetensors/../m", ""])
def test_further_names_of_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(sluice.PathEscapeError, match="not a plain path"):
        sluice.open(tmp_path)
