"""Ranks that call different functions, or from several threads: an error that names both, without a long wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

import sluice
from support.joint_loads import saved, sharded, with_options
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _optimizer(model: Any) -> Any:
    return torch.optim.SGD(model.parameters())


VERBS: dict[str, Callable[[Any, str], object]] = {
    "load_into": lambda model, folder: sluice.load_into(model, f"{folder}/model.pth"),
    "save": lambda model, folder: sluice.save(model, f"{folder}/other.pth"),
    "load_optimizer": lambda model, folder: sluice.load_optimizer(
        _optimizer(model), f"{folder}/model.pth", model=model
    ),
    "plan": lambda model, folder: sluice.plan(model, f"{folder}/model.pth"),
}


def call(folder: str, verbs: list[str]) -> tuple[str, float]:
    """Call a function of this rank; return the error and how long it took after the last rank came."""
    model = sharded("cpu")
    rank = torch.distributed.get_rank()
    time.sleep(0.2 * rank)
    torch.distributed.barrier()
    began = time.monotonic()
    try:
        VERBS[verbs[rank]](model, folder)
    except sluice.RankError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("verbs", list(combinations(("load_into", "save", "load_optimizer"), 2)), ids="-".join)
def test_different_functions(two_ranks: Ranks, tmp_path: Any, verbs: tuple[str, str]) -> None:
    saved(f"{tmp_path}/model.pth")
    for own in (verbs, verbs[::-1]):
        for text, seconds in two_ranks.run(call, str(tmp_path), list(own)):
            assert f"rank 1: called {own[1]}, rank 0 {own[0]}" in text
            assert "nothing was changed" in text
            assert seconds < 5, "it takes milliseconds; a rank that waits for others takes minutes"
    assert [text for text, _ in two_ranks.run(call, str(tmp_path), ["load_into"] * 2)] == ["", ""]


def plan_then_load(folder: str) -> str:
    """Plan on one rank while the other one loads already."""
    if torch.distributed.get_rank():
        VERBS["plan"](sharded("meta"), folder)
    return call(folder, ["load_into"] * 2)[0]


def test_a_plan_takes_part_in_nothing(two_ranks: Ranks, tmp_path: Any) -> None:
    saved(f"{tmp_path}/model.pth")
    assert two_ranks.run(plan_then_load, str(tmp_path)) == ["", ""]


def load_in_threads(paths: list[str], order: list[list[int]]) -> list[str]:
    """Load models in threads, whose loads begin in an order; return their errors by model."""
    models = [sharded("meta") for _ in paths]
    errors = ["" for _ in paths]

    def load(number: int) -> None:
        try:
            sluice.load_into(models[number], paths[number])
        except sluice.RankError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in order[torch.distributed.get_rank()]]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("same", [True, False])
def test_two_threads_take_turns(two_ranks: Ranks, tmp_path: Any, same: bool) -> None:
    """In another order on one rank, two different files meet: the error says that threads are why."""
    paths = [saved(f"{tmp_path}/{name}.pth") for name in "ab"]
    torch.save({name: -tensor for name, tensor in torch.load(paths[1]).items()}, paths[1])
    order = [[0, 1], [0, 1] if same else [1, 0]]
    outcome = two_ranks.run(with_options, {}, load_slowly, paths, order)
    if same:
        assert outcome == [["", ""]] * 2
    else:
        assert all("several threads make such calls" in text for errors in outcome for text in errors)


def load_a_stage(folder: str) -> tuple[bool, str]:
    """Load and save one stage of a pipeline, whose ranks are a row of the mesh; return whether it is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(5 + stage, 3) for _ in range(1 + stage)))
    fully_shard(model, mesh=mesh["dp"])
    sluice.load_into(model, f"{folder}/{stage}.pth")
    truth = torch.load(f"{folder}/{stage}.pth")
    right = all(torch.equal(tensor.full_tensor(), truth[name]) for name, tensor in model.state_dict().items())
    path = f"{folder}/{torch.distributed.get_rank()}.pth"
    try:
        sluice.save(model, path)
    except sluice.RankError as error:
        return right, str(error)
    return right, ""


def test_stages_of_a_pipeline_hold_different_models(four_ranks: Ranks, tmp_path: Any) -> None:
    for stage in (0, 1):
        model = torch.nn.Sequential(*(torch.nn.Linear(5 + stage, 3) for _ in range(1 + stage)))
        torch.save(model.state_dict(), tmp_path / f"{stage}.pth")
    for right, text in four_ranks.run(load_a_stage, str(tmp_path)):
        assert right
        assert f"different arguments: path={tmp_path}/0.pth and path={tmp_path}/1.pth" in text


def load_flat(path: str) -> str:
    """Load into a model of FSDP1; return the error."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        sluice.load_into(model, path)
    except sluice.MismatchError as error:
        return str(error)
    return ""


def test_fsdp1_is_named_first(two_ranks: Ranks, tmp_path: Any) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "m.pth")
    for text in two_ranks.run(load_flat, str(tmp_path / "m.pth")):
        assert text.startswith("the model is wrapped in FullyShardedDataParallel, which flattens")


def load_slowly(paths: list[str], order: list[list[int]]) -> list[str]:
    """Load in threads, each of which opens its file slowly, so that the calls overlap."""
    from sluice.loading import joint

    decide = joint._decide

    def slow(*arguments: Any) -> Any:
        time.sleep(0.6)
        return decide(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "_decide", slow)
        return load_in_threads(paths, order)
