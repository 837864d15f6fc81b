"""Files that are cut anywhere, changed at any byte or mutated: refused, or read as torch and safetensors read them.

``-s`` shows the counts.
"""

from __future__ import annotations

from collections import Counter

import pytest

from sluice._errors import CheckpointError, TruncatedError
from sluice._options import Limits
from sluice.formats.detection import detect
from support.mutations import FORMATS, SMALL, edits, judge_safetensors, judge_torch
from support.sources import MemorySource, RecordingSource

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("name", SMALL)
def test_a_file_cut_anywhere_is_refused(name: str) -> None:
    content = SMALL[name]()
    for end in range(len(content)):
        source = RecordingSource(MemorySource(content[:end]))
        with pytest.raises(CheckpointError) as caught:
            detect(source).read_index(source, Limits())
        assert caught.value.file == "memory"
        assert isinstance(caught.value, TruncatedError) or name.startswith("zip"), end
        assert source.read_bytes <= 8 * len(content) + 8192


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SMALL)
def test_a_changed_byte_gives_what_the_reference_reads(name: str, step: int) -> None:
    content, judge = SMALL[name](), judge_safetensors if name == "safetensors" else judge_torch
    changed = [*edits(content), *(content[:end] for end in range(len(content)))][::step]
    verdicts = Counter(map(judge, changed))
    print(f"\n{len(changed)} edits and prefixes of a {name} file: {verdicts}")
    assert {"same", "refused"} <= verdicts.keys()


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
