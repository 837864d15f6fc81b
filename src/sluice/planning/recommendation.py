"""Verdicts on the loading methods: whether each fits, and the recommended one with the reason.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from sluice._units import format_bytes
from sluice.planning.budget import HOST, MemoryLimit
from sluice.planning.other_methods import Forecast
from sluice.records import Peaks

__all__ = ["COPY", "MAP", "MethodVerdict", "judge", "recommend"]

#: Names of the methods of sluice.
COPY = "sluice"
MAP = "sluice, place='map'"


class MethodVerdict(Struct, frozen=True, kw_only=True):
    """Predicted memory and time of one loading method, and whether it fits.

    Growth is measured from before the model exists until every weight was accessed, so that methods are comparable.
    """

    #: Name of the method: ``"naive"``, ``"mmap"``, ``"sluice"``, ...
    method: str
    #: Predicted growth of host memory, in bytes.
    host: Peaks
    #: Predicted growth of the reserved bytes of each accelerator, by device.
    devices: Mapping[str, int]
    #: Estimated seconds; None without a read probe.
    seconds: float | None
    #: Whether it stays within the limits. File pages do not count, because the kernel can reclaim them.
    fits: bool
    #: Shortages, or other restrictions; empty if there are none.
    remark: str
    #: Requirement of the method that the load does not meet; empty if it meets all.
    needs: str

    @property
    def possible(self) -> bool:
        """Whether it fits and its requirements are met."""
        return self.fits and not self.needs


def judge(
    forecast: Forecast, devices: Mapping[str, int], limits: Sequence[MemoryLimit], *, resident: Mapping[str, int]
) -> MethodVerdict:
    """Return the verdict on a method.

    Args:
        forecast: Predicted memory and time of the method.
        devices: Predicted growth of the reserved bytes of each accelerator.
        limits: Limits on the growth of memory from now on.
        resident: Bytes of the model that are already in memory, by the names of ``limits``, which the method would not
            need again.
    """
    needed = {HOST: forecast.host.total_bytes - forecast.host.file_bytes, **devices}
    short = []
    for limit in limits:
        room = limit.nbytes + resident.get(limit.where, 0)
        excess = needed.get(limit.where, 0) - room
        if excess > 0:
            short.append(f"{format_bytes(excess)} of {limit.where} memory short ({limit.origin})")
    host = next(limit.nbytes + resident.get(HOST, 0) for limit in limits if limit.where == HOST)
    if not short and forecast.host.file_bytes and forecast.host.total_bytes > host:
        remark = "its file pages do not all stay in memory: evicted pages are read again when they are used"
    else:
        remark = "; ".join(short)
    return MethodVerdict(
        method=forecast.method,
        host=forecast.host,
        devices=dict(devices),
        seconds=forecast.seconds,
        fits=not short,
        remark=remark,
        needs=forecast.needs,
    )


def recommend(verdicts: Sequence[MethodVerdict]) -> tuple[str | None, str]:
    """Return the recommended method, or None if nothing fits, and the reason.

    Methods that do not fit or whose requirements are not met are excluded. The order of the rest is: copies by sluice,
    mapping by sluice, and the method that takes the least memory. Staging has a fixed size, so that methods that hold a
    small model twice can take less than sluice. sluice is still preferred, because it checks everything before it
    changes the model and leaves no file mapped; the reason then names the method that takes less.
    """
    possible = {verdict.method: verdict for verdict in verdicts if verdict.possible}
    if not possible:
        least = min(verdicts, key=_peak)
        return None, f"nothing fits: {least.method} takes the least, {_describe(least)}; {least.remark or least.needs}"
    if COPY in possible:
        return COPY, _reason(possible[COPY], verdicts)
    if MAP in possible:
        return MAP, "copied weights do not fit; mapped pages of the file are evicted when memory is short"
    best = min(possible.values(), key=_peak)
    return best.method, f"it takes the least memory of the methods that fit: {_describe(best)}"


def _reason(chosen: MethodVerdict, verdicts: Iterable[MethodVerdict]) -> str:
    """Return the reason for the copy by sluice, with a comparison to the other methods."""
    others = [verdict for verdict in verdicts if not verdict.method.startswith(COPY)]
    too_large = [verdict.method for verdict in others if not verdict.fits]
    fitting = [verdict for verdict in others if verdict.possible]
    text = f"it fits and takes {_describe(chosen)}"
    if fitting:
        least = min(fitting, key=_peak)
        if _peak(least) < _peak(chosen):
            text += f"; {least.method} takes less, {_describe(least)}, but {_drawback(least)}"
        else:
            text += f"; the leanest other method that reads this file, {least.method}, takes {_describe(least)}"
    elif not too_large:
        text += "; no other method supports this load"
    if too_large:
        text += f"; {', '.join(too_large)} would not fit"
    return text


def _drawback(verdict: MethodVerdict) -> str:
    """Return why a method that takes less memory is not preferred to sluice."""
    if verdict.method == "mmap":
        return "keeps the file mapped"
    return "checks less before it changes the model; the difference is at most sluice's staging and overhead"


def _peak(verdict: MethodVerdict) -> int:
    """Return the peak bytes of host and accelerators together."""
    return verdict.host.total_bytes + sum(verdict.devices.values())


def _describe(verdict: MethodVerdict) -> str:
    parts = [f"{format_bytes(verdict.host.total_bytes)} on the host"]
    parts += [f"{format_bytes(nbytes)} on {device}" for device, nbytes in verdict.devices.items()]
    return " and ".join(parts)
