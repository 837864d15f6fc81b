"""Ranks that call different functions, or from several threads: an error that names both, without a long wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.joint_loads import Net, saved, sharded, with_options
from support.ranks import Ranks, failure


def _optimizer(model: Any) -> Any:
    return torch.optim.SGD(model.parameters())


def _stream(model: Any, folder: str) -> None:
    with pytest.raises(sluice.StreamError, match="its parameters are DTensors"):
        sluice.stream(model, f"{folder}/model.pth")


#: Functions in which all ranks take part.
VERBS: dict[str, Callable[[Any, str], object]] = {
    "load_into": lambda model, folder: sluice.load_into(model, f"{folder}/model.pth"),
    "refresh": lambda model, folder: sluice.refresh(model, f"{folder}/model.pth"),
    "save": lambda model, folder: sluice.save(model, f"{folder}/other.safetensors", overwrite=True),
    "load_optimizer": lambda model, folder: sluice.load_optimizer(
        _optimizer(model), f"{folder}/optimizer.pth", model=model
    ),
}

#: Functions that one rank may call alone.
ALONE: dict[str, Callable[[Any, str], object]] = {
    "plan": lambda model, folder: sluice.plan(model, f"{folder}/model.pth"),
    "stream": _stream,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    saved(f"{tmp_path}/model.pth")
    torch.save(_optimizer(Net()).state_dict(), tmp_path / "optimizer.pth")
    return str(tmp_path)


def call(folder: str, verbs: list[str]) -> tuple[str, float]:
    """Call a function of this rank; return the error and how long it took after the last rank came."""
    model = sharded("cpu")
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()
    began = time.monotonic()
    if rank:
        time.sleep(0.2)
    return failure(VERBS[verbs[rank]], model, folder), time.monotonic() - began - 0.2


@pytest.mark.parametrize("verbs", [list(pair) for pair in permutations(VERBS, 2)], ids="-".join)
def test_different_functions(two_ranks: Ranks, folder: str, verbs: list[str]) -> None:
    for text, seconds in two_ranks.run(call, folder, verbs):
        assert f"rank 1: called {verbs[1]}, rank 0 {verbs[0]}" in text
        assert "nothing was changed" in text
        assert seconds < 3, "it takes milliseconds; a rank that waits for others takes minutes"
    for verb in verbs:  # the next correct calls
        assert [text for text, _ in two_ranks.run(call, folder, [verb] * 2)] == ["", ""]


def alone_first(folder: str, alone: str, verb: str, rank: int) -> str:
    """Call a function on one rank while the other one waits for it in a function of both."""
    if torch.distributed.get_rank() == rank:
        time.sleep(0.2)
        ALONE[alone](sharded("meta"), folder)
    return failure(VERBS[verb], sharded("cpu"), folder)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("alone", ALONE)
def test_plans_and_streams_take_part_in_nothing(two_ranks: Ranks, folder: str, alone: str, verb: str) -> None:
    for rank in (0, 1):
        assert two_ranks.run(alone_first, folder, alone, verb, rank) == ["", ""]


def call_on_one(folder: str, verb: str, rank: int) -> tuple[str, list[str]]:
    """Call on one rank only, with little patience; return the error and what was logged."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    model, text = sharded("cpu"), ""
    if torch.distributed.get_rank() == rank:
        logging.getLogger("sluice").addHandler(handler)
        text = failure(VERBS[verb], model, folder)
        logging.getLogger("sluice").removeHandler(handler)
    return text, words


HASTE = {
    "RANK_WORD_SECONDS": 0.2,
    "RANK_PATIENCE_SECONDS": 1.0,
    "RANK_PULSE_SECONDS": 0.1,
    "RANK_FAREWELL_SECONDS": 0.2,
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("verb", VERBS)
def test_a_rank_that_does_not_call(two_ranks: Ranks, folder: str, verb: str, rank: int) -> None:
    """``if rank == 0: load_into(...)``: a word, then an error; the next correct call succeeds."""
    text, words = two_ranks.run(with_options, HASTE, call_on_one, folder, verb, rank)[rank]
    assert f"rank {1 - rank}: did not call this function for 1 seconds" in text
    assert f"rank {1 - rank} has not called sluice" in words[0]
    assert [text for text, _ in two_ranks.run(call, folder, [verb] * 2)] == ["", ""]


def load_in_threads(paths: list[str], order: list[list[int]]) -> list[str]:
    """Load models in threads, whose loads begin in an order; return their errors by model."""
    models = [sharded("meta") for _ in paths]
    loads: dict[int, Future[str]] = {}
    with ThreadPoolExecutor() as pool:
        for number in order[torch.distributed.get_rank()]:
            loads[number] = pool.submit(failure, sluice.load_into, models[number], paths[number])
            time.sleep(0.2)
    return [loads[number].result() for number in sorted(loads)]


@pytest.mark.parametrize("same", [True, False])
def test_two_threads_take_turns(two_ranks: Ranks, tmp_path: Any, same: bool) -> None:
    """In another order on one rank, two different files meet."""
    paths = [saved(f"{tmp_path}/{name}.pth") for name in "ab"]
    torch.save({name: -tensor for name, tensor in torch.load(paths[1]).items()}, paths[1])
    order = [[0, 1], [0, 1] if same else [1, 0]]
    outcome = two_ranks.run(with_options, {}, load_slowly, paths, order)
    if same:
        assert outcome == [["", ""]] * 2
    else:
        assert all(text for errors in outcome for text in errors)


def save_beside_a_load(folder: str) -> str:
    """Save a model in a thread while a different one is loaded; return the error."""
    model = sharded("cpu")

    def save() -> str:
        time.sleep(0.2)
        return failure(VERBS["save"], model, folder)

    with ThreadPoolExecutor() as pool:
        saving = pool.submit(save)
        (text,) = load_slowly([f"{folder}/model.pth"], [[0]] * 2)
    return text + saving.result()


def test_a_save_beside_a_load_waits_for_it(two_ranks: Ranks, folder: str) -> None:
    assert two_ranks.run(save_beside_a_load, folder) == ["", ""]


def load_flat(path: str) -> str:
    """Load into a model of FSDP1; return the error."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    return failure(sluice.load_into, model, path)


def test_fsdp1_is_named_first(two_ranks: Ranks, tmp_path: Any) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "m.pth")
    for text in two_ranks.run(load_flat, str(tmp_path / "m.pth")):
        assert text.startswith(
            f"{tmp_path / 'm.pth'}: the model is wrapped in FullyShardedDataParallel, which flattens"
        )


def load_slowly(paths: list[str], order: list[list[int]]) -> list[str]:
    """Load in threads, each of which opens its file slowly, so that the calls overlap."""
    from sluice.loading import job, joint

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.6)
        return job.decide(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "decide", slow)
        return load_in_threads(paths, order)
