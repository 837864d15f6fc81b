"""The examples run, those of ranks under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest
from torch import nn

import sluice

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


def test_a_server_takes_new_weights_between_requests(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"

    def write(value: float) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        sluice.save(model, path, overwrite=True)

    write(0)
    command = [sys.executable, str(ROOT / "examples" / "serve_and_refresh.py"), str(path), "--port=0", "--every=0.02"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2].strip("/\n"))
            answers: dict[str, set[float]] = {}
            for value in (0, 1, 2):
                write(value)
                expected = 64 * value * (64 * value + value) + value
                deadline, output = time.monotonic() + 60, [None]
                while output != [expected] * 4 and time.monotonic() < deadline:
                    connection = HTTPConnection("127.0.0.1", port)
                    connection.request("GET", "/")
                    answer = json.loads(connection.getresponse().read())
                    connection.close()
                    output = answer["output"]
                    answers.setdefault(answer["version"], set()).update(output)
                assert output == [expected] * 4
        finally:
            server.terminate()
    assert sorted(map(sorted, answers.values())) == [[0], [4161], [16642]]  # one result for each version
