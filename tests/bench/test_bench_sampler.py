"""What the benchmark of the meter finds out, and that the meter stays cheap."""

from __future__ import annotations

import re
import time

import pytest
from click.testing import CliRunner

from bench import sampler


def test_the_helper_takes_a_small_part_of_a_core() -> None:
    cost = sampler.compare("sleep", lambda: time.sleep(0.5), runs=1, interval_seconds=0.001)
    # A few hundredths, and its start; 1 would be a helper that never sleeps. Processor time is blind to a busy machine.
    assert 0 < cost.helper_share < 0.4
    assert cost.alone_seconds >= 0.5
    assert cost.measured_seconds >= 0.5
    assert cost.ends_seconds > 0
    assert 5 < cost.samples_per_second < 1100


def test_what_the_meter_slows_down_is_found() -> None:
    calls: list[int] = []

    def slower_every_second_time() -> None:
        calls.append(len(calls))
        time.sleep(0.2 if len(calls) % 2 else 0.1)  # the first call is not counted, then alone and measured in turn

    cost = sampler.compare("work", slower_every_second_time, runs=3, interval_seconds=0.01)
    assert len(calls) == 7
    assert cost.slowdown > 0.3


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_ADDITIONS", 1000)
    monkeypatch.setattr(sampler, "_PRODUCTS", 1)
    monkeypatch.setattr(sampler, "_ROWS", 8)
    done = CliRunner().invoke(sampler.main, ["--size", "tiny", "--runs", "1"])
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^\| .* ms \| .*%", done.stdout, re.MULTILINE)) == 4
