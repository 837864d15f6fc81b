"""Loads of several ranks: all of them succeed, or none changes a model on meta, whatever happens to one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from support.joint_loads import STEPS, failing_load, load, saved, state_after
from support.ranks import Ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(str(tmp_path_factory.mktemp("joint") / "model.pth"))


def test_every_rank_gets_the_figures_of_all(two_ranks: Ranks, checkpoint: str) -> None:
    (first, right), (second, too) = two_ranks.run(load, checkpoint)
    assert right and too
    assert [each.rank for each in first.ranks] == [0, 1]
    assert first.ranks == second.ranks
    assert [each.read_bytes for each in first.ranks] == [first.read_bytes, second.read_bytes]
    assert "rank 1 on" in str(first)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["error", "interrupt", "memory"])
def test_a_rank_that_fails(two_ranks: Ranks, checkpoint: str, step: str, fault: str) -> None:
    culprit = STEPS.index(step) % 2
    outcomes = two_ranks.run(failing_load, checkpoint, step, fault, culprit)
    kind, text, failed, cause, _, usable = outcomes[culprit]
    other = outcomes[1 - culprit]
    assert usable and other[5], "the group is not usable afterwards"
    assert other[0] == "RankError"
    assert set(other[2]) == {culprit}
    assert other[3] == "NoneType"
    if fault == "interrupt":
        assert kind == "KeyboardInterrupt"
    else:
        assert (kind, text, failed) == other[:3]
        assert cause == {"error": "ReadError" if step == "never" else "OSError", "memory": "MemoryError"}[fault]


@pytest.mark.parametrize("culprit", [0, 3])
def test_of_four_ranks_all_but_one_raise_the_same(four_ranks: Ranks, checkpoint: str, culprit: int) -> None:
    outcomes = four_ranks.run(failing_load, checkpoint, "later read", "error", culprit)
    assert {outcome[1] for outcome in outcomes} == {outcomes[0][1]}
    assert all(set(outcome[2]) == {culprit} and outcome[5] for outcome in outcomes)


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_killed(checkpoint: str, step: str) -> None:
    culprit = 1 - STEPS.index(step) % 2
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(state_after, checkpoint, step, "kill", culprit, timeout=60)
    assert not outcomes[culprit][0]
    ok, (kind, text, failed, _, _) = outcomes[1 - culprit]
    assert ok
    assert kind == "RankError", text
    assert set(failed) == {culprit}
    assert "gone" in failed[culprit]


def test_a_rank_that_is_stopped(checkpoint: str) -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(state_after, checkpoint, "later read", "stop", 1, timeout=30)
    assert outcomes[0][1][0] == "RankError"
    assert "is stopped" in outcomes[0][1][2][1]
