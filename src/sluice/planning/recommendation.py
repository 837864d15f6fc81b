"""Which ways to load fit, and the one to take, with the reason. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice._units import format_bytes
from sluice.planning.budget import HOST, MemoryLimit
from sluice.planning.other_methods import Forecast
from sluice.records import Peaks

__all__ = ["COPY", "MAP", "MethodVerdict", "judge", "recommend"]

#: Names of sluice's own rows.
COPY = "sluice"
MAP = "sluice, place='map'"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodVerdict:
    """One way to load: what it would take, and whether that is there.

    Growth counts from before the model exists until every weight was touched, so that all ways can be compared.
    """

    #: Name of the method: ``"naive"``, ``"mmap"``, ``"sluice"``, ...
    method: str
    #: Predicted growth of host memory, in bytes.
    host: Peaks
    #: Predicted growth of what each accelerator's allocator reserves, in bytes.
    devices: Mapping[str, int]
    #: Estimated seconds; None without a read probe.
    seconds: float | None
    #: Whether the limits leave room for it. File pages do not count: the kernel takes them away when it has to.
    fits: bool
    #: What is short, or what else is to be known; empty when there is nothing to say.
    remark: str
    #: What it needs that this checkpoint is not; empty when it can take it as it is.
    needs: str

    @property
    def possible(self) -> bool:
        """Whether it fits and takes this checkpoint as it is."""
        return self.fits and not self.needs


def judge(
    found: Forecast, devices: Mapping[str, int], limits: Sequence[MemoryLimit], *, resident: Mapping[str, int]
) -> MethodVerdict:
    """Return whether a method fits.

    Args:
        found: What it takes.
        devices: The same for each accelerator.
        limits: What memory may grow by, from now on.
        resident: Bytes of the model that are in memory now, by the names of ``limits``: the method would not need them
            twice.
    """
    wanted = {HOST: found.host.total_bytes - found.host.file_bytes, **devices}
    short = []
    for limit in limits:
        room = limit.nbytes + resident.get(limit.where, 0)
        excess = wanted.get(limit.where, 0) - room
        if excess > 0:
            short.append(f"{format_bytes(excess)} of {limit.where} memory short ({limit.origin})")
    host = next(limit.nbytes + resident.get(HOST, 0) for limit in limits if limit.where == HOST)
    if not short and found.host.file_bytes and found.host.total_bytes > host:
        remark = "its file pages do not all stay in memory: what is used again is read again"
    else:
        remark = "; ".join(short)
    return MethodVerdict(
        method=found.method,
        host=found.host,
        devices=dict(devices),
        seconds=found.seconds,
        fits=not short,
        remark=remark,
        needs=found.needs,
    )


def recommend(verdicts: Sequence[MethodVerdict]) -> tuple[str | None, str]:
    """Return the method to take, or None when nothing fits, and why.

    What does not fit or does not take the checkpoint as it is is out. Of the rest sluice's copy comes first, then its
    mapping, then whatever takes least. Staging is a constant, so that ways that hold a small model twice can take less
    than sluice: it still comes first, because it checks everything before it touches the model and leaves no file
    mapped, and the reason says which way takes less.
    """
    possible = {verdict.method: verdict for verdict in verdicts if verdict.possible}
    if not possible:
        least = min(verdicts, key=_peak)
        return None, f"nothing fits: the least is {_describe(least)} of {least.method}, and {least.remark}"
    if COPY in possible:
        return COPY, _reason(possible[COPY], verdicts)
    if MAP in possible:
        return MAP, "weights that are copied do not fit; pages of the file take memory only while there is some"
    best = min(possible.values(), key=_peak)
    return best.method, f"it is the leanest that fits: {_describe(best)}"


def _reason(chosen: MethodVerdict, verdicts: Iterable[MethodVerdict]) -> str:
    others = [verdict for verdict in verdicts if not verdict.method.startswith(COPY)]
    killed = [verdict.method for verdict in others if not verdict.fits]
    fitting = [verdict for verdict in others if verdict.possible]
    text = f"it fits and takes {_describe(chosen)}"
    if fitting:
        least = min(fitting, key=_peak)
        if _peak(least) < _peak(chosen):
            text += f"; {least.method} takes less, {_describe(least)}, but {_drawback(least)}"
        else:
            text += f"; the leanest other way that takes this file, {least.method}, takes {_describe(least)}"
    elif not killed:
        text += "; no other way takes this checkpoint as it is"
    if killed:
        text += f"; {', '.join(killed)} would not fit"
    return text


def _drawback(verdict: MethodVerdict) -> str:
    """Say why a way that takes less comes behind sluice all the same."""
    if verdict.method == "mmap":
        return "keeps the file mapped"
    return "checks less before it changes the model; the difference is at most sluice's staging and overhead"


def _peak(verdict: MethodVerdict) -> int:
    return verdict.host.total_bytes + sum(verdict.devices.values())


def _describe(verdict: MethodVerdict) -> str:
    parts = [f"{format_bytes(verdict.host.total_bytes)} on the host"]
    parts += [f"{format_bytes(nbytes)} on {device}" for device, nbytes in verdict.devices.items()]
    return " and ".join(parts)
