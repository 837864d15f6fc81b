"""Plans of all ranks of a mesh, made in one process, compared with those of real ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice.loading.rank_plans import tensor_parallel_dims
from support.divided_models import divide_by_names
from support.ranks import Ranks

STYLES = {"table": "rowwise", "up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    """Layers whose sizes four ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 12)
        self.up = nn.Linear(12, 22)
        self.down = nn.Linear(22, 12)
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(Net().state_dict(), path)
    return path


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def held_by_this_rank(path: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """Divide the model; return what this rank holds and reads, in bytes."""
    model = on_meta()
    divide_by_names(model, names, sizes)
    report = sluice.plan(model, path)
    return report.final_bytes, report.read_bytes


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp": 2}])
def test_every_rank_holds_and_reads_what_it_would_with_a_process_group(
    four_ranks: Ranks, checkpoint: Path, sizes: Mapping[str, int]
) -> None:
    report: Any = sluice.plan(on_meta(), checkpoint, mesh=sizes, tp_plan=STYLES)
    found = four_ranks.run(held_by_this_rank, str(checkpoint), tuple(sizes), tuple(sizes.values()))
    assert [(rank.final_bytes, rank.read_bytes) for rank in report.ranks.ranks] == found
    assert (report.final_bytes, report.read_bytes) in found


def test_the_last_style_of_a_module_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plan = {"*": "colwise", "1": "replicate"}
    assert tensor_parallel_dims(model, plan) == {"0.weight": 0, "0.bias": 0}
    assert tensor_parallel_dims(model, {**plan, "0": "rowwise"}) == {"0.weight": 1}
    assert tensor_parallel_dims(model[0], {"": "colwise"}) == {"weight": 0, "bias": 0}


def test_replicas_read_what_others_read_too(checkpoint: Path) -> None:
    two: Any = np.int64(2)
    report = sluice.plan(on_meta(), checkpoint, mesh={"dp_replicate": 3, "dp": 2}, ranks_per_host=two)
    ranks: Any = report.ranks
    assert ranks.needed_bytes == report.checkpoint_bytes
    assert ranks.read_bytes == sum(rank.read_bytes for rank in ranks.ranks) >= 3 * ranks.needed_bytes
    assert [rank["host"] for rank in json.loads(json.dumps(ranks.to_json()))["ranks"]] == [0, 0, 1, 1, 2, 2]


def test_each_part_is_planned_once(checkpoint: Path) -> None:
    two: Any = sluice.plan(on_meta(), checkpoint, mesh={"dp": 2}).ranks
    many: Any = sluice.plan(on_meta(), checkpoint, mesh={"dp_replicate": 50_000, "dp": 2}).ranks
    assert len(many.ranks) == 100_000
    assert many.read_bytes == 50_000 * two.read_bytes
    assert many.needed_bytes == two.needed_bytes


def test_the_limit_is_that_of_a_host(checkpoint: Path) -> None:
    sizes = {"ddp": 4}
    alone = sluice.plan(on_meta(), checkpoint).predicted.total_bytes
    for limit, fits in ((4 * alone + (1 << 20), True), (2 * alone, False)):
        report = sluice.plan(on_meta(), checkpoint, mesh=sizes, memory=limit)
        assert report.fits is fits
        spread = sluice.plan(on_meta(), checkpoint, mesh=sizes, ranks_per_host=1, memory=limit)
        assert spread.fits


def test_models_of_transformers_bring_their_own_plan(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with sluice.empty_init():
        model = transformers.LlamaForCausalLM(config)
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(value.shape) for name, value in model.state_dict().items()}, path)
    ranks: Any = sluice.plan(model, path, mesh={"tp": 4}).ranks
    # Which modules the plan names depends on the version of transformers.
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in model.tp_plan]
    held = sum(
        parameter.nbytes // (4 if any(each.fullmatch(name.removesuffix(".weight")) for each in patterns) else 1)
        for name, parameter in model.named_parameters()
    )
    assert [rank.final_bytes for rank in ranks.ranks] == [held] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks_per_host": 2}, "need mesh="),
        ({"tp_plan": STYLES}, "need mesh="),
        ({"mesh": {"tp": 2}}, "needs tp_plan="),
        ({"mesh": {"tp": 2}, "tp_plan": {"nowhere": "colwise"}}, "'nowhere', which matches no module"),
        ({"mesh": {"tp": 2}, "tp_plan": {"up": "diagonal"}}, "'diagonal' is not known here; known are colwise"),
        ({"mesh": {"dp": 2}, "ranks_per_host": 0}, "must be positive"),
        ({"mesh": {"dp": 2}, "ranks_per_host": "8"}, "must be positive, not '8'"),
        ({"mesh": {"tp": 2}, "tp_plan": {"up": ["colwise"]}}, "is not known here"),
        ({"mesh": {"dp": 0}}, "positive number of ranks, not 0"),
        ({"mesh": {"dp": True}}, "positive number of ranks"),
        ({"mesh": {}}, "at least one dimension"),
        ({"mesh": {"pp": 2}}, "'pp' has no known meaning; use one of dp"),
        ({"mesh": {"dp": 2, "fsdp": 2}}, "dp and fsdp both shard"),
        ({"mesh": {"dp": 999_999_999}}, "999,999,999 ranks, .* parts; at most 1,048,576, 16,384"),
        ({"mesh": {"ddp": 1 << 21}}, "2,097,152 ranks, .* parts; at most 1,048,576, 16,384"),
        ({"mesh": {"dp": 2}, "quantize": Net.eval}, "quantize= needs a model, and no mesh"),
    ],
)
def test_ranks_that_cannot_be_planned_are_refused(checkpoint: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sluice.plan(on_meta(), checkpoint, **arguments)  # type: ignore[arg-type]


def test_missing_weights_of_dtensors_are_not_initialised(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: value for name, value in Net().state_dict().items() if name != "up.bias"}, path)
    with pytest.raises(sluice.MismatchError, match=r"'up.bias' is on the meta .* divided over ranks"):
        sluice.plan(on_meta(), path, mesh={"dp": 2}, strict=False)
    assert sluice.plan(on_meta(), path, mesh={"ddp": 2}, strict=False).initialised == ("up.bias",)


def test_a_mesh_needs_a_model_and_names(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="mesh= needs a model"):
        sluice.plan(None, checkpoint, mesh={"dp": 2})
    with pytest.raises(TypeError, match="mesh must be a mapping"):
        sluice.plan(on_meta(), checkpoint, mesh=(2, 2))  # type: ignore[arg-type]
