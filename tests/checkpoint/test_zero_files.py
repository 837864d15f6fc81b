"""Which directories are DeepSpeed's, and which of their files belong together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import FormatError, IncompleteCheckpointError, LimitError, Limits, PathEscapeError, UnsupportedError
from support.directories import refusal
from support.zero_files import example, unpacked, write_zero

TAG = "global_step7"
OPTIMIZER, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def test_a_model_next_to_the_state_is_the_model(tmp_path: Path) -> None:
    """The Trainer of transformers writes both; the optimizer is in the directory that ``latest`` names."""
    training = example()
    write_zero(tmp_path, training, stage=2, world=2)
    halves = {name: value.bfloat16() for name, value in training.weights.items()}
    sluice.save(halves, tmp_path / "model.safetensors")
    assert sluice.load_state_dict(tmp_path)["conv"].dtype == torch.bfloat16
    assert sluice.load_state_dict(tmp_path / TAG)["conv"].dtype == torch.float32
    groups = [{"params": [(n, torch.nn.Parameter(v)) for n, v in group.items()]} for group in training.groups]
    optimizer = torch.optim.AdamW(groups)
    sluice.load_optimizer(optimizer, tmp_path)
    assert len(optimizer.state) == 5
    with sluice.open(tmp_path) as checkpoint:
        sluice.load_optimizer(optimizer, checkpoint)


@pytest.mark.parametrize(
    "tag",
    [b"../outside", b"/etc", b"a\\b", b"", b"\xff\xfe", b"no such directory", b"a\0b", b"x" * 5000],
    ids=["above", "absolute", "backslash", "empty", "binary", "missing", "null", "long"],
)
def test_other_files_named_latest(tmp_path: Path, tag: bytes) -> None:
    write_zero(tmp_path / "outside", example(), stage=1, world=1, tag=".")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "latest").write_bytes(tag)
    torch.save(torch.ones(3), inside / "w.pt")
    assert list(sluice.load_state_dict(inside)) == ["w"]


def test_a_link_named_latest(tmp_path: Path) -> None:
    (tmp_path / "step7").mkdir()
    (tmp_path / "latest").symlink_to("step7")
    torch.save(torch.ones(3), tmp_path / "w.pt")
    assert list(sluice.load_state_dict(tmp_path)) == ["w"]


def test_links_out_of_the_directory(tmp_path: Path) -> None:
    place = write_zero(tmp_path / "run", example(), stage=1, world=2)
    outside = shutil.move(place / TAG / OPTIMIZER.format(1), tmp_path)
    (place / TAG / OPTIMIZER.format(1)).symlink_to(outside)
    assert sluice.load_state_dict(place)
    refusal(place, PathEscapeError, limits=Limits(symlinks_outside=False))


@pytest.mark.parametrize(
    ("stage", "gone"),
    [(2, OPTIMIZER.format(1)), (3, OPTIMIZER.format(0)), (3, MODEL.format(2)), (2, "mp_rank_00_model_states.pt")],
)
def test_missing_files(tmp_path: Path, stage: int, gone: str) -> None:
    place = write_zero(tmp_path, example(), stage=stage, world=3)
    (place / TAG / gone).unlink()
    for where in (place, place / TAG):
        assert gone in str(refusal(where, IncompleteCheckpointError))


def test_empty_files_are_named(tmp_path: Path) -> None:
    place = write_zero(tmp_path, example(), stage=1, world=2)
    os.truncate(place / TAG / OPTIMIZER.format(1), 0)
    assert OPTIMIZER.format(1) in str(refusal(place))


def test_without_zero_the_model_is_one_file(tmp_path: Path) -> None:
    torch.save({"module": example().weights, "param_shapes": None}, tmp_path / "mp_rank_00_model_states.pt")
    assert "pass the path of mp_rank_00_model_states.pt" in str(refusal(tmp_path))
    assert sluice.load_state_dict(tmp_path / "mp_rank_00_model_states.pt", key="module")


def test_files_of_two_saves(tmp_path: Path) -> None:
    place = write_zero(tmp_path, example(), stage=2, world=2)
    shutil.copy(place / TAG / OPTIMIZER.format(1), place / TAG / OPTIMIZER.format(2))
    error = refusal(place, FormatError)
    assert (error.expected, error.found) == ("2 ranks", OPTIMIZER.format(2))
    for rank in range(2):
        shutil.copy(place / TAG / OPTIMIZER.format(rank), place / TAG / f"bf16_{OPTIMIZER.format(rank)}")
    assert "two saves" in str(refusal(place))


def test_limits(tmp_path: Path) -> None:
    place = write_zero(tmp_path / "run", example(), stage=3, world=4)
    refusal(place, LimitError, limits=Limits(files=7))

    def many(name: str, content: Any) -> None:
        if "optim" in name:
            content["optimizer_state_dict"]["partition_count"] = 2**60

    error = refusal(write_zero(tmp_path / "many", example(), stage=3, world=1, change=many), LimitError)
    assert error.found == 2**60
    place = unpacked("stage-3", tmp_path / "universal") / "universal" / "global_step3"
    path = place / MODEL.format(0)
    torch.save(torch.load(path, weights_only=False) | {"dp_world_size": 10**6}, path)
    assert refusal(place, LimitError).found == 10**6


def test_universal_names_stay_inside(tmp_path: Path) -> None:
    place = unpacked("stage-2", tmp_path) / "universal" / "global_step3"
    path = place / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["param_shapes"][0]["../../run"] = torch.Size([1])
    torch.save(content, path)
    refusal(place, PathEscapeError)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda own: own.update(mp_world_size=2), "tensor or pipeline parallelism"),
        (lambda own: own.update(checkpoint_parallel_dimensions={"pp_degree": 2}), "tensor or pipeline parallelism"),
        (lambda own: own.update(num_experts=[4]), "experts"),
        (lambda own: own.update(ds_autoep_layers=[{"checkpoint_format": "zero3_partitioned"}]), "experts"),
        (lambda own: own.update(module=None), "files of their own"),
    ],
)
def test_models_that_were_divided_in_other_ways(tmp_path: Path, change: Change, text: str) -> None:
    place = write_zero(
        tmp_path, example(), stage=2, world=2, change=lambda name, own: change(own) if "model" in name else None
    )
    error = refusal(place, UnsupportedError, text)
    assert "DeepSpeed" in error.advice
