"""Loads of several ranks: all of them succeed, or none changes a model on meta, for any failure of one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sluice
from support import joint_loads as joint
from support.range_server import RangeServer
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return joint.saved(str(tmp_path_factory.mktemp("joint") / "model.pth"))


def test_every_rank_gets_the_figures_of_all(two_ranks: Ranks, checkpoint: str) -> None:
    (first, right), (second, too) = two_ranks.run(joint.load, checkpoint)
    assert (right, too) == (True, True)
    assert [each.rank for each in first.ranks] == [0, 1]
    assert first.ranks == second.ranks
    assert [each.read_bytes for each in first.ranks] == [first.read_bytes, second.read_bytes]
    assert "rank 1 on" in str(first)


def test_packed_tensors_are_divided(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(joint.load_packed, joint.saved_packed(str(tmp_path / "model.gguf"))) == [True, True]


@pytest.mark.parametrize("step", joint.STEPS)
@pytest.mark.parametrize("fault", ["error", "interrupt", "memory"])
def test_a_rank_that_fails(two_ranks: Ranks, checkpoint: str, step: str, fault: str) -> None:
    culprit = joint.STEPS.index(step) % 2
    outcomes = two_ranks.run(joint.failing_load, checkpoint, step, fault, culprit)
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
    outcomes = four_ranks.run(joint.failing_load, checkpoint, "later read", "error", culprit)
    assert {outcome[1] for outcome in outcomes} == {outcomes[0][1]}
    assert all(set(outcome[2]) == {culprit} and outcome[4] for outcome in outcomes)


@pytest.mark.parametrize("step", joint.STEPS)
def test_a_rank_that_is_killed(checkpoint: str, step: str) -> None:
    culprit = 1 - joint.STEPS.index(step) % 2
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(joint.state_after, checkpoint, step, "kill", culprit, timeout=60)
    assert not outcomes[culprit][0]
    ok, (kind, text, failed, _) = outcomes[1 - culprit]
    assert ok
    assert kind == "RankError", text
    assert set(failed) == {culprit}
    assert "gone" in failed[culprit]


def test_a_rank_that_is_stopped(two_ranks: Ranks, checkpoint: str) -> None:
    """It continues when the other one has given up, and then gets the same verdict."""
    options = {"RANK_STOPPED_SECONDS": 0.5}
    outcomes = two_ranks.run(joint.with_options, options, joint.state_after, checkpoint, "later read", "stop", 1)
    assert [outcome[0] for outcome in outcomes] == ["RankError"] * 2
    assert all("is stopped" in outcome[2][1] for outcome in outcomes)
    assert [right for _, right in two_ranks.run(joint.load, checkpoint)] == [True, True]


def test_live_tensors_that_changed_are_named(two_ranks: Ranks, checkpoint: str) -> None:
    """On the rank that failed some are torn; the other one may have finished, and names its own."""
    outcomes = two_ranks.run(joint.with_options, {"RANK_LOOK_SECONDS": 0.0}, joint.live_failing_load, checkpoint, 0)
    kind, done, torn, _ = outcomes[0]
    assert [failed for *_, failed in outcomes] == [[0], [0]]
    assert kind == "OSError"
    assert done or torn
    assert outcomes[1][1] or outcomes[1][2]


def test_different_arguments(two_ranks: Ranks, checkpoint: str) -> None:
    failed = two_ranks.run(joint.load_differently, [checkpoint] * 2, [{}, {"dtype": torch.bfloat16}])
    assert failed == [{1: "was called with dtype=bfloat16, rank 0 with dtype=None"}] * 2
    scaled = [{"rules": [sluice.rules.scale("**.weight", factor)]} for factor in (2.0, 3.0)]
    (text,) = two_ranks.run(joint.load_differently, [checkpoint] * 2, scaled)[0].values()
    assert re.search(r"was called with rules=\[EachRule\(.*effect=<function _changed>, .*3\.0", text)


def test_different_files(two_ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    other = tmp_path / "model.pth"
    state_dict = torch.load(checkpoint, weights_only=True)
    torch.save({name: state_dict[name] for name in reversed(state_dict)}, other)
    failed = two_ranks.run(joint.load_differently, [checkpoint, str(other)], [{}, {}])
    assert failed[0] == failed[1]
    assert "with different headers" in failed[0][1] or "bytes, rank 0" in failed[0][1]


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_an_older_copy_with_equal_sizes_and_headers(two_ranks: Ranks, tmp_path: Path, suffix: str) -> None:
    """Any record of a zip file may differ, because its CRC-32 does; in other formats a large part."""
    paths = [f"{tmp_path}/{name}.{suffix}" for name in "ab"]
    name = "norm.bias" if suffix == "pth" else "third.weight"
    sluice.save(joint.truth(), paths[0])
    sluice.save({**joint.truth(), name: joint.truth()[name] + 1}, paths[1])
    failed = two_ranks.run(joint.load_differently, paths, [{}, {}])
    assert failed == [failed[0]] * 2
    assert failed[0][1].startswith("has a different version of the files than rank 0")


def test_the_same_file_under_two_names(two_ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    other = tmp_path / "copy\udcff.pth"  # not UTF-8
    other.write_bytes(Path(checkpoint).read_bytes())
    assert two_ranks.run(joint.load_differently, [checkpoint, str(other)], [{}, {}]) == [{}, {}]
    failed = two_ranks.run(joint.load_differently, [checkpoint, f"{other}2"], [{}, {}])
    assert "copy\\udcff.pth2" in failed[0][1]


def test_a_limit_of_the_host_counts_all_ranks(two_ranks: Ranks, checkpoint: str) -> None:
    """The needs of one rank fit; those of both together do not."""
    (first, _), (second, _) = two_ranks.run(joint.load, checkpoint)
    needed = [each.predicted_bytes for each in first.ranks]
    limit = sum(needed) - 1
    assert limit > max(needed)
    failed = two_ranks.run(joint.load_differently, [checkpoint] * 2, [{"memory": limit}] * 2)
    assert set(failed[0]) == set(failed[1]) == {0, 1}
    assert "the ranks 0, 1 of host" in failed[0][0]
    assert two_ranks.run(joint.load_differently, [checkpoint] * 2, [{"memory": sum(needed)}] * 2) == [{}, {}]
    assert first.read_bytes + second.read_bytes < 1.1 * Path(checkpoint).stat().st_size


def test_ranks_of_a_host_fetch_a_cached_file_once(four_ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    sluice.save(joint.truth(), file)
    with RangeServer({"/m.safetensors": file.read_bytes()}) as server:
        loaded = four_ranks.run(joint.load_cached, server.url("/m.safetensors"), str(tmp_path / "cache"))
        ranges = [re.findall(r"\d+", request.headers.get("Range", "")) for request in server.requests]
    assert loaded == [True] * 4
    requested = sum(int(each[-1]) - int(each[0]) + 1 for each in ranges if len(each) == 2)
    assert file.stat().st_size * 0.9 < requested <= file.stat().st_size * 1.1 + len(ranges) * 16384


def test_quantizing_divided_weights_is_refused(two_ranks: Ranks, checkpoint: str) -> None:
    failed = two_ranks.run(joint.load_differently, [checkpoint] * 2, [{"quantize": print}] * 2)
    assert set(failed[0]) == {0, 1}
    assert all("is a DTensor; load" in text for text in failed[0].values())
