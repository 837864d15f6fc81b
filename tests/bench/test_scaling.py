"""Throttled loads: what is counted, and the report that is made of it."""

from __future__ import annotations

import itertools
from pathlib import Path

from bench.cost_model import Fit, Load, predict
from bench.scaling import Measurement, measure, report, write_checkpoint


def test_a_throttled_load_counts_its_reads_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, 6 << 20, 6, 3)
    load = measure(folder, 6 << 20, 6, latency=0.0, bandwidth=1e12, parallel=2).load
    assert (load.nbytes, load.tensors, load.files) == (6 << 20, 6, 3)
    assert load.requests >= 3
    assert 1 <= load.readers <= load.requests


def test_the_report_predicts_from_the_measurements() -> None:
    truth = Fit(coefficients=(0.01, 1e-4, 1e-3, 1e-10, 1.0), residuals=())
    loads = [
        Load(nbytes=nbytes, tensors=tensors, files=files, requests=64, readers=8, latency=latency, bandwidth=1e9)
        for nbytes, (tensors, files), latency in itertools.product((1e7, 1e8), ((8, 1), (2000, 1), (64, 32)), (0, 0.1))
    ]
    lines = report([Measurement(load=load, seconds=predict(truth, load).most) for load in loads])
    assert "Cross-validated error: median 0%, largest 0%." in lines
    (row,) = [line for line in lines if line.startswith("| network disk, 1 GB/s, 2 ms, 64 cores") and "F + " in line]
    # 0.01 + 1,200 tensors * 0.1 ms + 80 files * 1 ms; the source is busy for 400 s.
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == "0.21"
    assert cells[4] == "400"
