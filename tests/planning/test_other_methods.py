"""Formulas for other loading methods, computed by hand for small models, and the recommendation."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice.planning.budget import HOST, MemoryLimit
from sluice.planning.other_methods import METHODS, Forecast, Rates, Subject, Weight, forecast
from sluice.planning.recommendation import COPY, MAP, MethodVerdict, judge, recommend
from sluice.records import Peaks

MIB = 1 << 20
OVER = defaults.METHOD_OVERHEAD_BYTES

#: 100 + 40 MiB in fp32, and computed buffers of 10 MiB; the file holds 60 MiB more than the model.
WEIGHTS = tuple(
    Weight(file_bytes=a * MIB, built_bytes=b * MIB, final_bytes=c * MIB)
    for a, b, c in ((100, 100, 100), (40, 40, 40), (0, 10, 10))
)
HALF = tuple(
    Weight(file_bytes=a * MIB, built_bytes=b * MIB, final_bytes=c * MIB)
    for a, b, c in ((100, 100, 50), (40, 40, 20), (0, 10, 10))
)
FULL = Subject(weights=WEIGHTS, storages=(100 * MIB, 40 * MIB, 60 * MIB), format="torch-zip", files=1, device="cpu")
CAST = replace(FULL, weights=HALF)


def peaks(subject: Subject) -> dict[str, tuple[int, int, int]]:
    """Return anonymous, file and device MiB of each method, without the constant."""
    found = {}
    for method in METHODS:
        made = forecast(method, subject)
        found[method.name] = tuple(
            value // MIB for value in (made.host.anon_bytes - OVER, made.host.file_bytes, made.device_bytes)
        )
        assert made.host.total_bytes == made.host.anon_bytes + made.host.file_bytes
    return found  # type: ignore[return-value]  # three each


def test_on_the_host_in_the_files_dtype() -> None:
    assert peaks(FULL) == {
        "naive": (150 + 200, 0, 0),
        "sequential": (150 + 200, 0, 0),
        "meta-sequential": (150 + 200, 0, 0),
        "mmap": (0, 140, 0),
        "per-parameter": (150 + 100, 0, 0),
    }


def test_on_the_host_with_a_cast() -> None:
    assert peaks(CAST) == {
        "naive": (80 + 200, 0, 0),
        "sequential": (80 + 200, 0, 0),
        "meta-sequential": (80 + 200, 0, 0),
        "mmap": (80, 140, 0),
        "per-parameter": (80 + 100, 0, 0),
    }


def test_building_can_be_the_peak() -> None:
    """The model is built in fp32 and cast one parameter at a time: the first cast adds to the whole model."""
    small = replace(CAST, storages=(10 * MIB,))
    assert peaks(small)["naive"] == (150 + 50, 0, 0)


def test_on_an_accelerator() -> None:
    found = peaks(replace(CAST, device="cuda:0"))
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
        ({"format": "torch-legacy"}, {"naive", "sequential", "meta-sequential"}),
        ({"format": "safetensors"}, set()),
        ({"files": 2}, set()),
        ({"format": "per-parameter", "files": 3}, {"per-parameter"}),
        ({"several_devices": True}, set()),
    ],
)
def test_formats_that_each_method_reads(changes: dict[str, object], taking: set[str]) -> None:
    subject = replace(FULL, **changes)
    assert {method.name for method in METHODS if not forecast(method, subject).needs} == taking


def test_times_follow_the_rates() -> None:
    rates = Rates(sluice=1.0, serial=100 * MIB, initialise=50 * MIB, copy=200 * MIB)
    seconds = {method.name: forecast(method, FULL, rates).seconds for method in METHODS}
    assert seconds["meta-sequential"] == pytest.approx(200 / 100 + 140 / 200)
    assert seconds["naive"] == pytest.approx(150 / 50 + 200 / 100 + 140 / 200)
    assert seconds["mmap"] == pytest.approx(140 / 100)
    cached = forecast(METHODS[3], FULL, replace(rates, cached=True)).seconds
    assert cached == pytest.approx(140 / 400)
    assert forecast(METHODS[0], FULL).seconds is None


def verdict(method: str, mib: int, limit: int, *, file_mib: int = 0, needs: str = "") -> MethodVerdict:
    host = Peaks(anon_bytes=mib * MIB, file_bytes=file_mib * MIB, shmem_bytes=0, total_bytes=(mib + file_mib) * MIB)
    limits = [MemoryLimit(where=HOST, nbytes=limit * MIB, origin="free memory")]
    return judge(Forecast(method=method, host=host, needs=needs), {}, limits, resident={})


def test_file_pages_do_not_have_to_fit() -> None:
    mapped = verdict("mmap", 10, 50, file_mib=100)
    assert mapped.fits
    assert "do not all stay in memory" in mapped.remark
    assert not verdict("naive", 51, 50).fits
    assert "1.00 MiB of host memory short (free memory)" in verdict("naive", 51, 50).remark


def test_resident_bytes_are_not_needed_again() -> None:
    host = Peaks(anon_bytes=100 * MIB, file_bytes=0, shmem_bytes=0, total_bytes=100 * MIB)
    limits = [MemoryLimit(where=HOST, nbytes=60 * MIB, origin="free memory")]
    assert judge(Forecast(method="naive", host=host), {}, limits, resident={HOST: 40 * MIB}).fits
    assert not judge(Forecast(method="naive", host=host), {}, limits, resident={HOST: 39 * MIB}).fits


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
