"""The examples run, those of ranks under torchrun; the notebook runs, and what is committed of it is executed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from torch import nn

import sluice
from support.waiting import wait_until

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

            def answered(expected: float) -> bool:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as reply:
                    answer = json.load(reply)
                answers.setdefault(answer["version"], set()).update(answer["output"])
                return bool(answer["output"] == [expected] * 4)

            for value in (0, 1, 2):
                write(value)
                wait_until(partial(answered, 64 * value * (64 * value + value) + value), "the new weights answer")
        finally:
            server.terminate()
    assert sorted(map(sorted, answers.values())) == [[0], [4161], [16642]]  # one result for each version


NOTEBOOK = ROOT / "notebooks" / "memory_efficient_loading.ipynb"

_MOST_BYTES, _MOST_PICTURE_BYTES = 1 << 20, 100_000


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_NOTEBOOK_SIZE", "tiny")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # Jupyter starts a notebook in its own directory.
    client = NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    asyncio.run(client.async_execute())
    assert [cell.source for cell in notebook.cells] == sources
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 9
    text = "\n".join(output.get("text", "") for output in outputs)
    # The tiny model takes 33 MiB, staging more than that: only methods that hold the weights twice have a known figure.
    figures = dict(re.findall(r"^(ordinary|mapped): host ([\d.]+) F", text, re.MULTILINE))
    assert float(figures["ordinary"]) > 1.5
    assert float(figures["mapped"]) < 1.3
    assert "Nothing was read" in text


def test_what_is_committed_was_run_in_order_and_is_small() -> None:
    assert NOTEBOOK.stat().st_size < _MOST_BYTES
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [
        base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 9
    assert max(map(len, pictures)) < _MOST_PICTURE_BYTES
    assert "GPT-2 medium" in str(cells[1].outputs)
