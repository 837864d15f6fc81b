"""The benchmark of the meter, and the bound of the meter's overhead."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from bench import sampler


def test_cpu_time_of_the_helper_is_measured_and_it_sleeps_between_samples() -> None:
    cost = sampler.compare("sleep", lambda: time.sleep(0.5), runs=1, interval_seconds=0.001)
    assert cost.helper_share > 0
    assert cost.alone_seconds >= 0.5
    assert cost.measured_seconds >= 0.5
    assert cost.ends_seconds > 0
    assert 0 < cost.samples_per_second < 1100  # a helper that never sleeps takes tens of thousands of samples


def test_what_the_meter_slows_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.1, 0.2, 0.3, 0.25, 0.1, 0.1])  # alone and measured in turn; the first call is a warm-up
    calls: list[float] = []

    def timed(work: Callable[[], object]) -> float:
        work()
        return next(taken)

    monkeypatch.setattr(sampler, "_seconds", timed)
    cost = sampler.compare("work", lambda: calls.append(0), runs=3, interval_seconds=0.01)
    assert len(calls) == 7
    assert (cost.alone_seconds, cost.measured_seconds) == (0.1, 0.2)
    assert cost.slowdown == 1.0


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_ADDITIONS", 1000)
    monkeypatch.setattr(sampler, "_PRODUCTS", 1)
    monkeypatch.setattr(sampler, "_ROWS", 8)
    done = CliRunner().invoke(sampler.main, ["--size", "tiny", "--runs", "1"])
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^\| .* ms \| .*%", done.stdout, re.MULTILINE)) == 4
