"""The examples run under torchrun, as their heads say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("example", "ranks"),
    [
        ("fsdp2.py", 2),
        pytest.param("tensor_parallel.py", 4, marks=pytest.mark.long),
    ],
)
def test_an_example_runs_on_ranks(example: str, ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, ROOT / "examples" / example], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ran = sorted(re.findall(r"rank (\d): read \d+ bytes", done.stdout))
    assert ran == [str(rank) for rank in range(ranks)]
