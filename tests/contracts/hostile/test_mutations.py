"""Mutated files are refused or read as torch and safetensors read them. ``-s`` shows the counts."""

from __future__ import annotations

from collections import Counter

import pytest

from support.mutations import FORMATS

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
    generate, judge = FORMATS[name]
    verdicts = Counter(map(judge, generate(count, 20)))
    print(f"\n{count} mutated {name} files: {verdicts}")
    assert {"same", "refused"} <= verdicts.keys()
