"""States that were divided over ranks are refused by kind, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import MismatchError, UnsupportedError
from support.training_runs import KINDS, net

PART = torch.zeros(40)
ADAM = {"state": {0: {"step": 3, "exp_avg": PART, "exp_avg_sq": PART}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

#: Content of a file, and part of the error text.
STATES: dict[str, tuple[Any, str]] = {
    "ZeRO 1 and 2": (
        {"optimizer_state_dict": {"zero_stage": 2, "base_optimizer_state": ADAM, "partition_count": 2}},
        "DeepSpeed's ZeRO .* the directory with the files of all ranks",
    ),
    "ZeRO in bfloat16": (
        {"optimizer_state_dict": {"base_optimizer_state": ADAM, "single_partition_of_fp32_groups": [PART]}},
        "DeepSpeed's ZeRO",
    ),
    "ZeRO 3": ({"zero_stage": 3, "fp32_flat_groups": [PART], "optimizer_state_dict": ADAM}, "DeepSpeed's ZeRO"),
    "Megatron": (
        {0: {"float32": {"param": PART, "exp_avg": PART, "exp_avg_sq": PART}}, "buckets_coalesced": True},
        "Megatron .* --ckpt-format torch_dist",
    ),
    "FSDP1": (
        {
            "state": {"blocks.0._fsdp_wrapped_module._flat_param": {"exp_avg": PART}},
            "param_groups": [{"lr": 0.1, "params": ["blocks.0._fsdp_wrapped_module._flat_param"]}],
        },
        "flat parameters of FSDP1.* FULL_STATE_DICT",
    ),
}


@pytest.mark.parametrize(("content", "problem"), STATES.values(), ids=STATES)
@pytest.mark.parametrize("key", [None, "inside"])
def test_files(tmp_path: Path, content: Any, problem: str, key: str | None) -> None:
    torch.save(content if key is None else {"inside": content, "step": 1}, tmp_path / "f.pt")
    model = net()
    optimizer = KINDS["AdamW"](model)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        sluice.load_optimizer(optimizer, tmp_path / "f.pt", model=model, key=key)
    assert caught.value.file == str(tmp_path / "f.pt")
    assert not optimizer.state


@pytest.mark.parametrize("name", ["mp_rank_00_001/distrib_optim.pt", "distrib_optim.pt"])
def test_directories(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save(ADAM, tmp_path / name)
    for load in (lambda: sluice.load_optimizer(KINDS["AdamW"](net()), tmp_path), lambda: sluice.open(tmp_path)):
        with pytest.raises(UnsupportedError, match="Megatron") as caught:
            load()
        assert caught.value.file == str(tmp_path)


def test_flat_parameters_of_the_optimizer(tmp_path: Path) -> None:
    torch.save(ADAM, tmp_path / "f.pt")
    flat = nn.Parameter(torch.zeros(40))
    flat._is_flat_param = True  # type: ignore[attr-defined]  # as FSDP1 marks its own
    with pytest.raises(MismatchError, match=r"parameter 0 is a flat parameter of FSDP1.* use_orig_params=True"):
        sluice.load_optimizer(torch.optim.AdamW([flat]), tmp_path / "f.pt")
