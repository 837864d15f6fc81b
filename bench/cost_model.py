"""A model of the time of a load, fitted by least squares to loads from throttled sources.

The time is a sum of non-negative terms, each a feature of the load times a coefficient of the machine:

- ``call``: fixed cost of opening and loading;
- ``tensor``: planning, matching and installing of a tensor, in one thread;
- ``file``: opening and parsing the header of a file;
- ``byte``: page faults and copies of a finished byte, on all cores together;
- ``source``: the least time that the source needs, see ``Load.source_seconds``.

The source's latency and bandwidth are given, not fitted. The coefficient of ``source`` says how well the reads reach
them: 1 for a source that is kept busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FEATURES", "Fit", "Load", "Prediction", "cross_validated_errors", "features", "fit", "predict", "terms"]

#: Names of the terms, in the order of ``features``.
FEATURES = ("call", "tensor", "file", "byte", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes and counts of a load, and its source."""

    #: Bytes that are read.
    nbytes: float
    #: Number of tensors.
    tensors: float
    #: Number of files.
    files: float
    #: Number of reads.
    requests: float
    #: Reads in flight at once.
    readers: float
    #: Time from a request to its first byte, in seconds.
    latency: float
    #: Bytes per second of the source, all readers together.
    bandwidth: float

    @property
    def source_seconds(self) -> float:
        """Least time of the source: its bandwidth is used up, or each reader waits for one read after the other."""
        read = self.latency + self.nbytes / self.requests / self.bandwidth
        return max(self.latency + self.nbytes / self.bandwidth, -(-self.requests // self.readers) * read)

    @property
    def most_latency(self) -> float:
        """Latency above which the reads in flight no longer fill the bandwidth, in seconds (Little's law)."""
        return (self.readers - 1) * self.nbytes / self.requests / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients and how well they describe the measurements."""

    #: Coefficients in the order of ``FEATURES``, in seconds per unit of the feature.
    coefficients: tuple[float, ...]
    #: Measured minus predicted, in seconds, in the order of the measurements.
    residuals: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The time of a load, between two assumptions about the work on its bytes."""

    #: All work on the bytes is done while the source is waited for, or the other way round.
    least: float
    #: No work on the bytes is done while the source is waited for.
    most: float


def features(load: Load) -> tuple[float, ...]:
    """Return the features of a load, in the order of ``FEATURES``."""
    return (1.0, load.tensors, load.files, load.nbytes, load.source_seconds)


def terms(fitted: Fit, load: Load, *, cores_ratio: float = 1.0) -> tuple[float, ...]:
    """Return the seconds of each feature, in the order of ``FEATURES``.

    Args:
        fitted: The coefficients.
        load: The load.
        cores_ratio: Cores that work on the bytes at once, divided by those of the measured machine.
    """
    call, tensor, file, byte, source = map(float.__mul__, fitted.coefficients, map(float, features(load)))
    return call, tensor, file, byte / cores_ratio, source


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> Fit:
    """Return the non-negative coefficients with the least sum of squared relative errors.

    Args:
        loads: The measured loads, at least as many as features.
        seconds: Time of each load, above 0.

    Raises:
        ValueError: There are too few loads, or they cannot tell the features apart.
    """
    matrix = np.array([features(load) for load in loads], dtype=float).reshape(-1, len(FEATURES))
    times = np.asarray(seconds, dtype=float)
    # Features differ by ten orders of magnitude: their columns are scaled before the rank is judged.
    scales = np.abs(matrix).max(axis=0, initial=0.0)
    if len(matrix) < len(FEATURES) or not scales.all():
        raise ValueError(f"{len(matrix)} loads cannot determine {len(FEATURES)} coefficients")
    weighted = matrix / scales / times[:, None]
    if np.linalg.matrix_rank(weighted) < len(FEATURES):
        raise ValueError("the loads are too alike: no coefficient can be told from the others")
    # The source is never faster than its least time: its coefficient is 1 and a fitted part that is not negative.
    rest = 1 - matrix[:, -1] / times
    coefficients = _non_negative(weighted, rest) / scales
    coefficients[-1] += 1
    residuals = times - matrix @ coefficients
    return Fit(coefficients=tuple(map(float, coefficients)), residuals=tuple(map(float, residuals)))


def _non_negative(weighted: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the least-squares solution of ``weighted @ x = wanted`` with ``x >= 0``, tried by sets of columns."""
    best, least = np.zeros(weighted.shape[1]), float((wanted**2).sum())
    for chosen in range(1, 1 << weighted.shape[1]):
        columns = [column for column in range(weighted.shape[1]) if chosen >> column & 1]
        part = np.linalg.lstsq(weighted[:, columns], wanted, rcond=None)[0]
        error = float(((weighted[:, columns] @ part - wanted) ** 2).sum())
        if (part >= 0).all() and error < least:
            least = error
            best = np.zeros(weighted.shape[1])
            best[columns] = part
    return best


def predict(fitted: Fit, load: Load, *, cores_ratio: float = 1.0) -> Prediction:
    """Return the predicted time of a load, in seconds; the arguments are those of ``terms``."""
    *serial, byte, source = terms(fitted, load, cores_ratio=cores_ratio)
    return Prediction(least=sum(serial) + max(byte, source), most=sum(serial) + byte + source)


def cross_validated_errors(loads: Sequence[Load], seconds: Sequence[float]) -> list[float]:
    """Return the relative error of each load, predicted by a fit to all others; positive if predicted too long."""
    errors = []
    for left_out, load in enumerate(loads):
        others = [number for number in range(len(loads)) if number != left_out]
        fitted = fit([loads[number] for number in others], [seconds[number] for number in others])
        errors.append(predict(fitted, load).most / seconds[left_out] - 1)
    return errors
