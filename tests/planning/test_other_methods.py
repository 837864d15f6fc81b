"""Formulas for other loading methods, computed by hand for small models, and the recommendation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from sluice.benchmark.gpt2 import gpt2, random_state_dict, write_checkpoint
from sluice.benchmark.loads import run_job
from sluice.benchmark.records import MethodJob, Precision
from sluice.planning.budget import HOST, MemoryLimit
from sluice.planning.other_methods import COPY, MAP, METHODS, MethodVerdict, Subject, Weight, judge, predict, recommend

MIB = 1 << 20
PLENTY = [MemoryLimit(where=HOST, nbytes=1 << 60, origin="free memory")]

#: 100 + 40 MiB in fp32, and computed buffers of 10 MiB.
FULL = ((100, 100, 100), (40, 40, 40), (0, 10, 10))
#: The same, finished in half the size.
HALF = ((100, 100, 50), (40, 40, 20), (0, 10, 10))
#: The file holds 60 MiB more than the model.
STORAGES = (100, 40, 60)


def subject(
    weights: tuple[tuple[int, int, int], ...] = FULL, storages: tuple[int, ...] = STORAGES, **changes: Any
) -> Subject:
    """Return a subject of sizes in MiB."""
    sizes = [Weight(*(MIB * nbytes for nbytes in weight)) for weight in weights]
    known = {"file_format": "torch-zip", "devices": ["cpu"], **changes}
    return Subject(sizes, [MIB * nbytes for nbytes in storages], **known)


def peaks(of: Subject) -> dict[str, tuple[int, int, int]]:
    """Return anonymous, file and device MiB of each method, without the constant."""
    found = {}
    for name in METHODS:
        made = judge(name, *predict(name, of), limits=PLENTY, resident={})
        device = sum(made.devices.values())
        found[name] = (
            (made.host.anon_bytes - defaults.METHOD_OVERHEAD_BYTES) // MIB, made.host.file_bytes // MIB, device // MIB
        )  # fmt: skip
        assert made.host.total_bytes == made.host.anon_bytes + made.host.file_bytes
    return found


@pytest.mark.parametrize(("weights", "final"), [(FULL, 150), (HALF, 80)], ids=["as in the file", "cast"])
def test_on_the_host(weights: tuple[tuple[int, int, int], ...], final: int) -> None:
    assert peaks(subject(weights)) == {
        "naive": (final + 200, 0, 0),
        "sequential": (final + 200, 0, 0),
        "meta-sequential": (final + 200, 0, 0),
        "mmap": (final if weights is HALF else 0, 140, 0),
        "per-parameter": (final + 100, 0, 0),
    }


def test_building_can_be_the_peak() -> None:
    """The model is built in fp32 and cast one parameter at a time: the first cast adds to the whole model."""
    assert peaks(subject(HALF, (10,)))["naive"] == (150 + 50, 0, 0)


def test_on_an_accelerator() -> None:
    found = peaks(subject(HALF, devices=["cuda:0"]))
    assert {name: host for name, (host, _, _) in found.items()} == {
        "naive": 150 + 50,  # built on the host, with the cast of its largest parameter
        "sequential": 200,  # L, which is larger
        "meta-sequential": 100,
        "mmap": 0,
        "per-parameter": 100 + 50,
    }
    assert found["mmap"][1] == 200
    assert {name: device for name, (_, _, device) in found.items()} == {
        "naive": 80 + 200,
        "sequential": 80 + 100,
        "meta-sequential": 80 + 200,
        "mmap": 200 + 50,
        "per-parameter": 80,
    }


@pytest.mark.parametrize(
    ("changes", "taking"),
    [
        ({}, {"naive", "sequential", "meta-sequential", "mmap"}),
        ({"file_format": "torch-legacy"}, {"naive", "sequential", "meta-sequential"}),
        ({"file_format": "safetensors"}, set()),
        ({"file_format": "several files"}, set()),
        ({"file_format": "per-parameter"}, {"per-parameter"}),
        ({"devices": ["cuda:0", "cuda:1"]}, set()),
    ],
)
def test_formats_that_each_method_reads(changes: dict[str, Any], taking: set[str]) -> None:
    needs = {name: predict(name, subject(**changes))[-1] for name in METHODS}
    assert {name for name, needed in needs.items() if not needed} == taking


def verdict(method: str, mib: int, limit: int, *, file_mib: int = 0, needs: str = "") -> MethodVerdict:
    limits = [MemoryLimit(where=HOST, nbytes=limit * MIB, origin="free memory")]
    return judge(method, (mib * MIB, file_mib * MIB), {}, needs, limits=limits, resident={})


def test_file_pages_do_not_have_to_fit() -> None:
    mapped = verdict("mmap", 10, 50, file_mib=100)
    assert mapped.fits
    assert "do not all stay in memory" in mapped.remark
    assert not verdict("naive", 51, 50).fits
    assert "1.00 MiB of host memory short (free memory)" in verdict("naive", 51, 50).remark


def test_resident_bytes_are_not_needed_again() -> None:
    limits = [MemoryLimit(where=HOST, nbytes=60 * MIB, origin="free memory")]
    assert judge("naive", (100 * MIB, 0), {}, "", limits=limits, resident={HOST: 40 * MIB}).fits
    assert not judge("naive", (100 * MIB, 0), {}, "", limits=limits, resident={HOST: 39 * MIB}).fits


def test_the_recommended_method_fits_takes_the_file_and_comes_with_a_reason() -> None:
    chosen, reason = recommend([verdict("naive", 200, 150), verdict("mmap", 0, 150), verdict(COPY, 110, 150)])
    assert chosen == COPY
    assert "naive would not fit" in reason
    assert "mmap" in reason
    chosen, reason = recommend([verdict("naive", 200, 100), verdict(COPY, 110, 100), verdict(MAP, 10, 100)])
    assert chosen == MAP
    assert "pages of the file" in reason
    chosen, reason = recommend([verdict("mmap", 10, 100, needs="needs a zip"), verdict(COPY, 110, 100)])
    assert chosen is None
    assert "nothing fits" in reason
    chosen, _ = recommend([verdict("naive", 90, 100), verdict("per-parameter", 80, 100), verdict(COPY, 110, 100)])
    assert chosen == "per-parameter"


def test_a_method_that_takes_less_is_named_with_the_reason_why_it_is_not_recommended() -> None:
    small = [verdict("naive", 66, 900), verdict("per-parameter", 40, 900, needs="needs files"), verdict(COPY, 69, 900)]
    chosen, reason = recommend(small)
    assert chosen == COPY
    assert "it fits and takes 69.0 MiB on the host; naive takes less, 66.0 MiB on the host, but checks less" in reason
    _, reason = recommend([verdict("mmap", 1, 900, file_mib=60), verdict("naive", 90, 900), verdict(COPY, 69, 900)])
    assert "mmap takes less, 61.0 MiB on the host, but keeps the file mapped" in reason
    _, reason = recommend([verdict("naive", 200, 900), verdict(COPY, 110, 900)])
    assert "the leanest other method that reads this file, naive, takes 200 MiB" in reason
    assert "takes less" not in reason
    _, reason = recommend([verdict("naive", 66, 900, needs="needs one torch.save file"), verdict(COPY, 110, 900)])
    assert "no other method supports this load" in reason


def _error_mib(size: str, folder: Path, method: str, dtype: Precision) -> tuple[float, float]:
    """Predict a method in this process and run it in a fresh one; return the error and the measured peak, in MiB."""
    path = folder / (f"{size}-parameters" if method == "per-parameter" else f"{size}.pth")
    if not path.exists():
        write_checkpoint(random_state_dict(size, torch.float32), path)
    with sluice.empty_init():
        model = gpt2(size)
    planned = sluice.plan(model, path, dtype=getattr(torch, dtype))
    (predicted,) = (each.host.total_bytes for each in planned.methods if each.method == method)
    job = MethodJob(method=method, model=size, checkpoint=str(path), dtype=dtype, device="cpu", verify=False)
    outcome = run_job(job)
    assert outcome.status == "ok", outcome.reason
    return (predicted - outcome.total_bytes) / MIB, outcome.total_bytes / MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predicted")


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of other processes is read from /proc")
@pytest.mark.parametrize(("method", "dtype"), [("naive", "float32"), ("mmap", "bfloat16"), ("sluice", "bfloat16")])
def test_predictions_of_a_small_model(folder: Path, method: str, dtype: Precision) -> None:
    """33 MiB in the file, so that one copy more or fewer exceeds the permitted error."""
    error, _ = _error_mib("tiny", folder, method, dtype)
    assert abs(error) <= 28


@pytest.mark.long
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of other processes is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [*METHODS, COPY])
def test_predictions_keep_what_is_promised(folder: Path, method: str, dtype: Precision) -> None:
    """The error is at most 5 % or 32 MiB for sluice, 10 % or 64 MiB for the others, whichever is more."""
    error, measured = _error_mib("small", folder, method, dtype)
    assert abs(error) <= (max(0.05 * measured, 32) if method == COPY else max(0.10 * measured, 64))
