"""Mutated files are refused or read as torch and safetensors read them. ``-s`` shows the counts."""

from __future__ import annotations

import pytest

from support.mutations import run

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("zip", 250),
        ("legacy", 800),
        ("safetensors", 1000),
        pytest.param("zip", 20_000, marks=pytest.mark.long),
        pytest.param("legacy", 20_000, marks=pytest.mark.long),
        pytest.param("safetensors", 100_000, marks=pytest.mark.long),
    ],
)
def test_mutated_files_are_refused_or_read_as_the_reference_reads_them(name: str, count: int) -> None:
    verdicts = run(name, count)
    print(f"\n{count} mutated {name} files\n{verdicts.table()}")
    assert sum(verdicts.counts.values()) == count
    assert {"same", "refused"} <= verdicts.counts.keys()
