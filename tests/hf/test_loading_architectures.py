"""Every architecture in every saved form: sluice and transformers load equal models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.hf_architectures import CASES, Case
from support.hf_comparing import assert_same, outputs, save_bin

_PARAMETERS = [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.long) for case in CASES]

#: Forms of saved models, and the dtypes to load from each.
_FORMS: dict[str, tuple[torch.dtype, ...]] = {
    "safetensors": (torch.float32, torch.bfloat16),
    "safetensors-shards": (torch.float32,),
    "bin": (torch.bfloat16,),
    "bin-shards": (torch.float32,),
}


def _save(model: Any, directory: Path, form: str) -> Path:
    path = directory / form
    if form == "safetensors":
        model.save_pretrained(path)
    elif form == "safetensors-shards":
        model.save_pretrained(path, max_shard_size="30KB")
    else:
        save_bin(model, directory / "safetensors", path, shards=1 if form == "bin" else 3)
    return path


@pytest.mark.parametrize("case", _PARAMETERS)
def test_it_loads_as_transformers_does(transformers: Any, tmp_path: Path, case: Case) -> None:
    model = case.model(transformers)
    inputs = case.inputs()
    for form, dtypes in _FORMS.items():
        path = _save(model, tmp_path, form)
        for dtype in dtypes:
            torch.manual_seed(1)  # heads that are missing in the checkpoint are random
            theirs = type(model).from_pretrained(path, dtype=dtype)
            torch.manual_seed(1)
            ours = sluice.hf.from_pretrained(path, dtype=dtype)
            assert_same(ours, theirs)
            expected, found = outputs(theirs, inputs), outputs(ours, inputs)
            if isinstance(expected, str):
                assert dtype is torch.bfloat16
                assert found == expected
            else:
                assert expected
                assert isinstance(found, list)
                assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_there_are_at_least_forty() -> None:
    assert len({case.name for case in CASES}) >= 40
