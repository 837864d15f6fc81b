"""Loads of several ranks: all of them succeed, or none changes a model on meta, for any failure of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from support.divided_models import mesh_of
from support.joint_loads import (
    ROUND_STEPS,
    STEPS,
    bytes_recorded,
    failing_load,
    live_failing_load,
    load,
    load_differently,
    load_divided,
    load_packed,
    saved,
    saved_packed,
    state_after,
    truth,
    with_options,
)
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(str(tmp_path_factory.mktemp("joint") / "model.pth"))


def test_every_rank_gets_the_figures_of_all(two_ranks: Ranks, checkpoint: str) -> None:
    (first, right), (second, too) = two_ranks.run(load, checkpoint)
    assert (right, too) == (True, True)
    assert [each.rank for each in first.ranks] == [0, 1]
    assert first.ranks == second.ranks
    assert [each.read_bytes for each in first.ranks] == [first.read_bytes, second.read_bytes]
    assert "rank 1 on" in str(first)


@pytest.mark.parametrize("share", ["none", "once"])
def test_packed_tensors_are_divided_and_shared(two_ranks: Ranks, tmp_path: Path, share: str) -> None:
    assert two_ranks.run(load_packed, saved_packed(str(tmp_path / "model.gguf")), share) == [True, True]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["error", "interrupt", "memory"])
def test_a_rank_that_fails(two_ranks: Ranks, checkpoint: str, step: str, fault: str) -> None:
    culprit = STEPS.index(step) % 2
    outcomes = two_ranks.run(failing_load, checkpoint, step, fault, culprit)
    kind, text, failed, cause, usable = outcomes[culprit]
    other = outcomes[1 - culprit]
    assert (usable, other[4]) == (True, True), "the group is not usable afterwards"
    assert other[0] == "RankError"
    assert set(other[2]) == {culprit}
    assert other[3] == "NoneType"
    if fault == "interrupt":
        assert kind == "KeyboardInterrupt"
    else:
        assert (kind, text, failed) == other[:3]
        assert cause == {"error": "OSError", "memory": "MemoryError"}[fault]


@pytest.mark.parametrize("culprit", [0, 3])
def test_of_four_ranks_all_but_one_raise_the_same(four_ranks: Ranks, checkpoint: str, culprit: int) -> None:
    outcomes = four_ranks.run(failing_load, checkpoint, "later read", "error", culprit)
    assert {outcome[1] for outcome in outcomes} == {outcomes[0][1]}
    assert all(set(outcome[2]) == {culprit} and outcome[4] for outcome in outcomes)


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_killed(checkpoint: str, step: str) -> None:
    culprit = 1 - STEPS.index(step) % 2
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(state_after, checkpoint, step, "kill", culprit, timeout=60)
    assert not outcomes[culprit][0]
    ok, (kind, text, failed, _) = outcomes[1 - culprit]
    assert ok
    assert kind == "RankError", text
    assert set(failed) == {culprit}
    assert "gone" in failed[culprit]


def test_a_rank_that_is_stopped(two_ranks: Ranks, checkpoint: str) -> None:
    """It continues when the other one has given up, and then gets the same verdict."""
    options = {"RANK_STOPPED_SECONDS": 0.5}
    outcomes = two_ranks.run(with_options, options, state_after, checkpoint, "later read", "stop", 1)
    assert [outcome[0] for outcome in outcomes] == ["RankError"] * 2
    assert all("is stopped" in outcome[2][1] for outcome in outcomes)
    assert [right for _, right in two_ranks.run(load, checkpoint)] == [True, True]


def test_live_tensors_that_changed_are_named(two_ranks: Ranks, checkpoint: str) -> None:
    """On the rank that failed some are torn; the other one may have finished, and names its own."""
    outcomes = two_ranks.run(with_options, {"RANK_LOOK_SECONDS": 0.0}, live_failing_load, checkpoint, 0)
    kind, done, torn, _ = outcomes[0]
    assert [failed for *_, failed in outcomes] == [[0], [0]]
    assert kind == "OSError"
    assert done or torn
    assert outcomes[1][1] or outcomes[1][2]


def test_different_arguments(two_ranks: Ranks, checkpoint: str) -> None:
    failed = two_ranks.run(load_differently, [checkpoint] * 2, [{}, {"dtype": torch.bfloat16}])
    assert failed == [{1: "was called with dtype=bfloat16, rank 0 with dtype=None"}] * 2


def test_different_files(two_ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    other = tmp_path / "model.pth"
    state_dict = torch.load(checkpoint, weights_only=True)
    torch.save({name: state_dict[name] for name in reversed(state_dict)}, other)
    failed = two_ranks.run(load_differently, [checkpoint, str(other)], [{}, {}])
    assert failed[0] == failed[1]
    assert "with different headers" in failed[0][1] or "bytes, rank 0" in failed[0][1]


def test_the_same_file_under_two_names(two_ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    other = tmp_path / "copy.pth"
    other.write_bytes(Path(checkpoint).read_bytes())
    assert two_ranks.run(load_differently, [checkpoint, str(other)], [{}, {}]) == [{}, {}]


def test_a_limit_of_the_host_counts_all_ranks(two_ranks: Ranks, checkpoint: str) -> None:
    """The needs of one rank fit; those of both together do not."""
    (first, _), (second, _) = two_ranks.run(load, checkpoint)
    needed = [each.predicted_bytes for each in first.ranks]
    limit = sum(needed) - 1
    assert limit > max(needed)
    failed = two_ranks.run(load_differently, [checkpoint] * 2, [{"memory": limit}] * 2)
    assert set(failed[0]) == set(failed[1]) == {0, 1}
    assert "the ranks 0, 1 of host" in failed[0][0]
    assert two_ranks.run(load_differently, [checkpoint] * 2, [{"memory": sum(needed)}] * 2) == [{}, {}]
    assert first.read_bytes + second.read_bytes < 1.1 * Path(checkpoint).stat().st_size


@pytest.mark.parametrize("arguments", [{}, {"dtype": torch.bfloat16}, {"memory": sluice.MemoryLimits(staging="2MiB")}])
def test_shared_bytes_are_read_once(four_ranks: Ranks, checkpoint: str, arguments: dict[str, object]) -> None:
    """Small tensors and their neighbors, replicated tensors and columns: no byte is read by two ranks."""
    results = four_ranks.run(load_divided, checkpoint, "once", arguments)
    assert [right for _, right in results] == [True] * 4
    reports = [report for report, _ in results]
    assert sum(each.read_bytes for each in reports[0].ranks) <= 1.02 * sum(each.nbytes for each in truth().values())
    assert all(each.received_bytes for each in reports[0].ranks)
    assert any("are read once, in" in note for note in reports[0].notes)


def test_sources_see_each_byte_once(four_ranks: Ranks, tmp_path: Path) -> None:
    """The reads that reach the file, not those of the report."""
    state_dict = truth()
    file = tmp_path / "model.safetensors"
    sluice.save(state_dict, file)
    nbytes = sum(each.nbytes for each in state_dict.values())
    samples = 4 * 16 * 4096  # that ranks compare
    assert sum(four_ranks.run(bytes_recorded, str(file), "once")) <= 1.02 * nbytes + samples
    assert sum(four_ranks.run(bytes_recorded, str(file), "none")) > 1.5 * nbytes


def test_each_rank_reads_for_itself_on_one_host(four_ranks: Ranks, checkpoint: str) -> None:
    results = four_ranks.run(load_divided, checkpoint, "auto", {})
    assert [right for _, right in results] == [True] * 4
    assert not any(each.received_bytes for each in results[0][0].ranks)
    assert any("all ranks are on one host" in note for note in results[0][0].notes)


@pytest.mark.parametrize("step", ["first read", *ROUND_STEPS])
@pytest.mark.parametrize("fault", ["error", "interrupt"])
def test_a_rank_that_fails_while_ranks_read_for_each_other(
    four_ranks: Ranks, checkpoint: str, step: str, fault: str
) -> None:
    """Every rank ends at the same round, and the group transfers the next load."""
    culprit = 1 + ROUND_STEPS.index(step) if step in ROUND_STEPS else 0
    outcomes = four_ranks.run(failing_load, checkpoint, step, fault, culprit, "once")
    assert [usable for *_, usable in outcomes] == [True] * 4
    kinds = ["RankError"] * 4
    if fault == "interrupt":
        kinds[culprit] = "KeyboardInterrupt"
    assert [kind for kind, *_ in outcomes] == kinds
    assert {tuple(outcome[2]) for outcome in outcomes if outcome[0] == "RankError"} == {(culprit,)}


@pytest.mark.parametrize(("step", "culprit"), [("first read", 1), ("read of a round", 1), ("copy of a round", 0)])
def test_a_rank_that_is_killed_while_ranks_read_for_each_other(checkpoint: str, step: str, culprit: int) -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(state_after, checkpoint, step, "kill", culprit, "once", timeout=60)
    ok, (kind, text, failed, _) = outcomes[1 - culprit]
    assert ok
    assert kind == "RankError", text
    assert set(failed) == {culprit}
    assert "gone" in failed[culprit]


def refused_quantize(path: str) -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with sluice.empty_init():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_module(model, mesh_of(2), {"0": ColwiseParallel()})
    try:
        sluice.load_into(model, path, quantize=print)
    except sluice.RankError as error:
        return str(error)
    return "loaded"


def test_quantizing_divided_weights_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "linear.pth"
    torch.save(torch.nn.Sequential(torch.nn.Linear(4, 4)).state_dict(), path)
    assert all("is a DTensor; load" in text for text in two_ranks.run(refused_quantize, str(path)))
