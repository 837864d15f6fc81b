"""Small files of each format, truncated at every byte or with any byte changed: typed error or the same tensors.

``test_mutations`` makes random changes and compares with torch and safetensors.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch

import sluice
from sluice._errors import CheckpointError, SluiceError, TruncatedError
from sluice._options import Limits
from sluice.formats.detection import detect
from support.mutations import SMALL, edits, judge_safetensors, judge_torch
from support.sources import MemorySource, RecordingSource


@pytest.mark.parametrize("name", SMALL)
def test_a_file_cut_anywhere_is_refused(name: str) -> None:
    content = SMALL[name]()
    for end in range(len(content)):
        source = RecordingSource(MemorySource(content[:end]))
        with pytest.raises(CheckpointError) as caught:
            detect(source).read_index(source, Limits())
        assert caught.value.file == "memory"
        assert isinstance(caught.value, TruncatedError) or name.startswith("zip"), end
        assert source.read_bytes <= 8 * len(content) + 8192


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SMALL)
def test_a_changed_byte_gives_what_the_reference_reads(name: str, step: int) -> None:
    content, judge = SMALL[name](), judge_safetensors if name == "safetensors" else judge_torch
    changed = [*edits(content), *(content[:end] for end in range(len(content)))][::step]
    verdicts = Counter(map(judge, changed))
    print(f"\n{len(changed)} edits and prefixes of a {name} file: {verdicts}")
    assert {"same", "refused"} <= verdicts.keys()


INDEX = json.dumps({"metadata": {"total_size": 20}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})


def test_a_directory_whose_index_is_changed_gives_the_same_tensors_or_an_error(tmp_path: Path) -> None:
    saved = {"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.int16)}
    for number, (name, tensor) in enumerate(saved.items(), 1):
        safetensors.torch.save_file({name: tensor}, tmp_path / f"{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    outcomes = set()
    for changed in list(edits(INDEX.encode()))[::3]:
        index.write_bytes(changed)
        try:
            with sluice.open(tmp_path) as checkpoint:
                assert checkpoint.keys() == saved.keys()
        except SluiceError as error:
            outcomes.add(type(error).__name__)
            continue
        outcomes.add("same")
    assert {"same", "FormatError", "IncompleteCheckpointError"} <= outcomes
