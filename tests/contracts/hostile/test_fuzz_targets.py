"""The fuzz targets without the fuzzer: their seeds, and a few mutations. ``make fuzz`` runs the fuzzer."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import seeds, targets

CORPUS = Path(seeds.__file__).parent / "corpus"


@pytest.mark.parametrize("name", targets.TARGETS)
def test_the_corpus_matches_the_seeds(name: str) -> None:
    contents = {path.read_bytes() for path in (CORPUS / name).iterdir()}
    assert contents == set(seeds.seeds()[name])
    assert sum(map(len, contents)) < 16_384


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", targets.TARGETS)
def test_changed_seeds_stay_inside_the_error_tree(name: str, count: int) -> None:
    choose = random.Random(7)
    contents = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    for content in contents:
        targets.run(name, content)
    for _ in range(count):
        changed = bytearray(choose.choice(contents))
        for _ in range(choose.randint(1, 4)):
            position = choose.randrange(len(changed))
            changed[position : position + choose.randint(0, 3)] = choose.randbytes(choose.randint(0, 3))
            changed = changed or bytearray(1)
        targets.run(name, bytes(changed))


def test_the_targets_need_no_torch() -> None:
    code = "import sys, fuzz.targets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CORPUS.parent.parent)
