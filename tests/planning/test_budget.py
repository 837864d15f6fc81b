"""Memory limits: their origins, the plans that exceed them, and alternatives that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import sluice
from sluice.planning.budget import HOST, find_limits, growth_of_copies, shortages
from sluice.records import LoadPlan, MachineFacts
from support.plans import entry, facts, planned, request

MIB = 1 << 20


def plan(mib: int, machine: MachineFacts | None = None, **options: Any) -> LoadPlan:
    """Return the plan for one fp32 tensor."""
    wanted = request("w", entry((mib * MIB // 4,)))
    return planned([wanted], [(0, mib * MIB)], machine or facts(cached=False), **options)


def test_the_tightest_of_free_memory_and_control_group_is_the_limit_of_the_host() -> None:
    machine = replace(facts(available=10 * MIB), memory_limit_bytes=11 * MIB)
    limit = find_limits(machine, sluice.MemoryLimits())[0]
    assert (limit.where, limit.nbytes, limit.origin) == (HOST, 10 * MIB, "free memory")
    limited = replace(machine, memory_limit_bytes=7 * MIB)
    assert find_limits(limited, sluice.MemoryLimits())[0].origin == "left in the control group"
    said = find_limits(limited, sluice.MemoryLimits(host="9MiB"))[0]
    assert (said.nbytes, said.origin) == (9 * MIB, "MemoryLimits(host=...)")


def test_a_shortage_is_described_as_text() -> None:
    made = plan(400)
    memory = sluice.MemoryLimits(host=made.predicted.total_bytes)
    assert not shortages(made, memory)
    text = str(shortages(made, sluice.MemoryLimits(host="300MiB"))[0])
    assert text.startswith("the load needs 416 MiB of host memory: 400 MiB for weights, 16.0 MiB for staging")


def test_pages_are_dropped_if_they_would_not_fit_the_control_group() -> None:
    cold = facts(cached=False, direct_io=False)
    assert not plan(100, cold).drop_behind
    assert not plan(100, replace(cold, memory_limit_bytes=300 * MIB)).drop_behind
    crowded = replace(cold, memory_limit_bytes=180 * MIB)
    assert plan(100, crowded).drop_behind
    assert not plan(100, crowded, page_cache="keep").drop_behind
    cached = replace(facts(cached=True, direct_io=False), memory_limit_bytes=180 * MIB)
    assert not plan(100, cached).drop_behind  # cached pages are charged to another group, or already counted
    direct = replace(facts(cached=False), memory_limit_bytes=180 * MIB)
    assert not plan(100, direct).drop_behind


@pytest.mark.parametrize(
    ("copies", "growth"),
    [
        ([], 0),
        ([(4 * MIB, 5 * MIB)], 5 * MIB),  # the old one is freed when the copy is complete
        ([(4 * MIB, 5 * MIB), (6 * MIB, 6 * MIB), (4 * MIB, 4 * MIB)], 6 * MIB + MIB),
        ([(100, 300), (0, 200)], 500),  # small ones share an arena with tensors that stay
    ],
)
def test_large_tensors_are_freed_one_after_the_other(copies: list[tuple[int, int]], growth: int) -> None:
    assert growth_of_copies(iter(copies)) == growth


SIZES = [(1024, 1024)] * 12  # 48 MiB


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "f.pth"
    torch.save({str(i): torch.full(shape, float(i)) for i, shape in enumerate(SIZES)}, path)
    return path


def model(live: torch.dtype | None) -> nn.ParameterList:
    device = "meta" if live is None else "cpu"
    return nn.ParameterList([nn.Parameter(torch.empty(shape, device=device, dtype=live)) for shape in SIZES])


@pytest.fixture(autouse=True)
def _not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan depend on which pages of the file are in the page cache."""
    monkeypatch.setattr("sluice.machine.facts._cached", lambda *_: ())


CASES: list[tuple[torch.dtype | None, dict[str, Any], int]] = [
    (None, {}, 60),
    (None, {}, 45),
    (None, {}, 30),
    (None, {}, 20),
    (None, {"dtype": torch.bfloat16}, 50),
    (None, {"dtype": torch.bfloat16}, 41),
    (None, {"dtype": torch.bfloat16}, 30),
    (None, {"dtype": torch.float64}, 70),
    (None, {"page_cache": "bypass"}, 60),
    (torch.float32, {"dtype": torch.bfloat16}, 50),
    (torch.float32, {"dtype": torch.float64}, 30),
    (torch.bfloat16, {}, 40),
    (torch.bfloat16, {}, 20),
]


@pytest.mark.parametrize(("live", "options", "mib"), CASES)
def test_every_alternative_that_is_offered_fits_and_is_needed(
    file: Path, live: torch.dtype | None, options: dict[str, Any], mib: int
) -> None:
    arguments = {**options, "memory": sluice.MemoryLimits(host=mib * MIB)}
    with pytest.raises(sluice.BudgetError, match="What would fit: ") as caught:
        sluice.load_into(model(live), file, **arguments)
    for alternative in caught.value.alternatives:
        changed = {**arguments, **alternative.arguments}
        report = sluice.load_into(model(live), file, **changed)
        assert report.predicted.total_bytes == alternative.needs["host"] <= mib * MIB
        assert str(alternative) in str(caught.value)
        assert ("dtype='auto'" in alternative.change) == (alternative.arguments.get("dtype") == "auto")


def test_smaller_staging_is_the_largest_that_fits(file: Path) -> None:
    with pytest.raises(sluice.BudgetError) as caught:
        sluice.load_into(model(torch.bfloat16), file, memory=sluice.MemoryLimits(host="21MiB"), page_cache="bypass")
    sizes = [each.arguments["memory"] for each in caught.value.alternatives if "memory" in each.arguments]
    assert sizes == [sluice.MemoryLimits(host="21MiB", staging=4 * MIB)]
    larger = sluice.MemoryLimits(host="21MiB", staging="8MiB")
    with pytest.raises(sluice.BudgetError):
        sluice.load_into(model(torch.bfloat16), file, memory=larger, page_cache="bypass")


def test_no_alternative_is_offered_if_nothing_fits(file: Path) -> None:
    with pytest.raises(sluice.BudgetError) as caught:
        sluice.load_into(model(None), file, memory=sluice.MemoryLimits(host="2MiB"))
    assert caught.value.alternatives == ()
    assert "would fit" not in str(caught.value)


def test_alternatives_for_state_dicts_use_arguments_that_they_have(file: Path) -> None:
    memory = sluice.MemoryLimits(host="50MiB")
    with pytest.raises(sluice.BudgetError) as caught:
        sluice.load_state_dict(file, memory=memory)
    assert all("dtype=torch.bfloat16" in each.change for each in caught.value.alternatives)
    arguments: dict[str, Any] = {"memory": memory, **caught.value.alternatives[0].arguments}
    state = sluice.load_state_dict(file, **arguments)
    assert state["3"].dtype == torch.bfloat16
