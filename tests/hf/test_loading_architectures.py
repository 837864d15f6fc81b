"""Every architecture in every saved form, whole and divided over ranks: sluice and transformers load equal models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import sluice
import sluice.hf
from support.divided_models import locals_of
from support.hf_architectures import CASES, Case, case_named
from support.hf_comparing import assert_same, outputs, save_bin, save_llama
from support.ranks import Ranks, failure

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


def compared(folder: Path, options: dict[str, Any]) -> list[str]:
    """Load a model with the library and with sluice on this rank; return what differs."""
    import torch.distributed as dist

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    with mock.patch.dict(os.environ, launched):  # as torchrun sets them
        return list(_compared(folder, options))


def _compared(folder: Path, options: dict[str, Any]) -> Iterator[str]:
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**options), dtype=torch.float32
    )
    reports: list[Any] = []
    if options.keys() == {"tp_plan"}:
        found = sluice.hf.from_pretrained(folder, tp_plan=options["tp_plan"], report=reports.append)
    else:
        found = sluice.hf.from_pretrained(folder, distributed_config=options, report=reports.append)
    own, truth = locals_of(found), locals_of(expected)
    yield from (name for name in truth if not torch.equal(own[name], truth[name]))
    yield from own.keys() ^ truth.keys()
    tokens = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        if not torch.equal(found(tokens).logits, expected(tokens).logits):
            yield "logits"
    if not any(hasattr(parameter, "to_local") for parameter in found.parameters()):
        yield "nothing is divided"


@pytest.mark.parametrize(
    "name",
    [
        "Phi3ForCausalLM",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("LlamaForCausalLM", "MixtralForCausalLM")),
    ],
)
def test_each_rank_gets_the_weights_that_the_library_gives_it(
    name: str, transformers: Any, tmp_path: Path, two_ranks: Ranks
) -> None:
    case_named(name).model(transformers).save_pretrained(tmp_path, max_shard_size="10kB")
    for options in ({"tp_plan": "auto"}, {"tp_size": 2}, {"fsdp_size": 2}):
        assert two_ranks.run(compared, tmp_path, options) == [[]] * 2, options


def test_pipelines_are_refused(transformers: Any, tmp_path: Path, two_ranks: Ranks) -> None:
    save_llama(transformers, tmp_path)
    refused = partial(failure, sluice.hf.from_pretrained, tmp_path, distributed_config={"pp_size": 2})
    assert all("pp_size must be 1" in text for text in two_ranks.run(refused))
