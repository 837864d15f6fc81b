"""The cost model: fits recover known coefficients, and predictions grow with what a load has more of."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bench.cost_model import FEATURES, Fit, Load, cross_validated_errors, features, fit, predict, terms

_TRUTH = Fit(coefficients=(0.004, 15e-6, 3e-4, 2e-10, 1.1), residuals=())

_LOADS = [
    Load(
        nbytes=nbytes, tensors=tensors, files=files, requests=requests, readers=8, latency=latency, bandwidth=bandwidth
    )
    for nbytes, (tensors, requests, files), (latency, bandwidth) in itertools.product(
        (16e6, 128e6), ((8, 16, 1), (2000, 300, 1), (64, 64, 32)), ((0.0, 1e9), (0.02, 1e10))
    )
]

_LOAD = Load(nbytes=1e9, tensors=100, files=4, requests=500, readers=8, latency=0.02, bandwidth=1e9)


def _seconds(truth: Fit) -> list[float]:
    return [predict(truth, load).most for load in _LOADS]


def test_a_fit_recovers_known_coefficients() -> None:
    seconds = _seconds(_TRUTH)
    fitted = fit(_LOADS, seconds)
    assert fitted.coefficients == pytest.approx(_TRUTH.coefficients, rel=1e-6)
    assert fitted.residuals == pytest.approx([0.0] * len(_LOADS), abs=1e-9)
    assert cross_validated_errors(_LOADS, seconds) == pytest.approx([0.0] * len(_LOADS), abs=1e-6)


def test_no_coefficient_is_negative() -> None:
    fitted = fit(_LOADS, _seconds(replace(_TRUTH, coefficients=(-0.001, *_TRUTH.coefficients[1:]))))
    assert min(fitted.coefficients) >= 0
    assert any(fitted.residuals)


def test_no_source_is_faster_than_its_least_time() -> None:
    fitted = fit(_LOADS, _seconds(replace(_TRUTH, coefficients=(*_TRUTH.coefficients[:4], 0.7))))
    assert fitted.coefficients[-1] >= 1


def test_loads_that_cannot_tell_the_features_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="3 loads"):
        fit(_LOADS[:3], [1.0] * 3)
    with pytest.raises(ValueError, match="too alike"):
        fit(_LOADS[:1] * 9, [1.0] * 9)


def test_the_left_out_load_does_not_influence_its_own_prediction() -> None:
    seconds = _seconds(_TRUTH)
    seconds[0] *= 2
    assert cross_validated_errors(_LOADS, seconds)[0] == pytest.approx(-0.5)


def test_the_source_takes_its_bandwidth_or_its_latency() -> None:
    load = replace(_LOAD, requests=100, latency=0.002)  # a read of 10 MB occupies the line for 10 ms
    assert load.source_seconds == pytest.approx(0.002 + 1.0)
    assert replace(load, latency=0.1).source_seconds == pytest.approx(13 * (0.1 + 0.01))  # 13 rounds of 8 reads
    assert replace(load, readers=1).source_seconds == pytest.approx(100 * (0.002 + 0.01))
    assert features(load) == pytest.approx((1.0, 100, 4, 1e9, 1.002))
    assert len(features(load)) == len(FEATURES)


def test_the_latency_limit_is_where_the_bandwidth_is_no_longer_filled() -> None:
    load = replace(_LOAD, requests=80_000, nbytes=8e11)
    assert load.most_latency == pytest.approx(0.07)  # seven further reads of 10 ms
    full = load.nbytes / load.bandwidth
    assert replace(load, latency=0.069).source_seconds == pytest.approx(full, rel=1e-3)
    assert replace(load, latency=0.14).source_seconds > 1.8 * full


def test_a_prediction_lies_between_full_and_no_overlap() -> None:
    fitted = Fit(coefficients=(0.5, 0.01, 0.25, 3e-9, 1.0), residuals=())
    load = replace(_LOAD, latency=0.0)
    assert terms(fitted, load) == pytest.approx((0.5, 1.0, 1.0, 3.0, 1.0))
    assert predict(fitted, load).least == pytest.approx(2.5 + 3.0)
    assert predict(fitted, load).most == pytest.approx(2.5 + 3.0 + 1.0)
    four = predict(fitted, load, cores_ratio=4.0)  # only the work on the bytes is divided
    assert (four.least, four.most) == pytest.approx((2.5 + 1.0, 2.5 + 0.75 + 1.0))


@pytest.mark.parametrize("field", ["nbytes", "tensors", "files", "latency"])
def test_more_work_never_takes_less_time(field: str) -> None:
    times = [predict(_TRUTH, replace(_LOAD, **{field: getattr(_LOAD, field) * factor})).most for factor in (1, 2, 10)]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize("field", ["readers", "bandwidth"])
def test_a_faster_source_never_takes_more_time(field: str) -> None:
    load = replace(_LOAD, latency=0.03)
    times = [predict(_TRUTH, replace(load, **{field: getattr(load, field) * factor})).most for factor in (1, 2, 10)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
