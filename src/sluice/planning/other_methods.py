"""Memory peaks of other ways to load a model, whether each fits, and which one is recommended.

Growth counts from the construction of the model until every weight was accessed. Times are measured by
``sluice bench``, not predicted. Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._units import format_bytes
from sluice.planning.budget import HOST, MemoryLimit
from sluice.planning.cuda_allocator import plan_reservation
from sluice.records import Peaks

__all__ = ["COPY", "MAP", "METHODS", "MethodVerdict", "Subject", "Weight", "judge", "predict", "recommend"]

#: Names of the methods of sluice.
COPY = "sluice"
MAP = "sluice, place='map'"


class Weight(NamedTuple):
    """Bytes of one tensor of a model: in the checkpoint (0 if it is not there), after construction, when finished."""

    file: int
    built: int
    final: int


class Subject:
    """A model and its checkpoint, with the sizes that the formulas need, in bytes.

    Args:
        weights: Tensors of the model, in its order.
        storages: Bytes of each storage of the checkpoint, all of which ``torch.load`` reads.
        file_format: ``Checkpoint.format``, or "several files".
        devices: Devices of the finished model, the one with most of its tensors first.
    """

    def __init__(
        self, weights: Sequence[Weight], storages: Sequence[int], *, file_format: str, devices: Sequence[str]
    ) -> None:
        self.file_format, self.devices, self.storages = file_format, devices or ("cpu",), storages
        self.finals = [weight.final for weight in weights]
        self.final, self.loaded = sum(self.finals), sum(storages)
        self.in_file = sum(weight.file for weight in weights)
        self.largest_in_file = max((weight.file for weight in weights), default=0)
        self.largest_storage = max(storages, default=0)
        #: Largest finished tensor that is not of the dtype of the file.
        self.cast = max((each.final for each in weights if each.file not in {0, each.final}), default=0)
        cast = max((each.final for each in weights if each.built != each.final), default=0)
        built = sum(weight.built for weight in weights)
        #: The model after its constructor, with one tensor cast at a time.
        self.built = max(built, self.final) + cast if cast else built


class _Method(Struct, frozen=True, kw_only=True):
    """Peaks of one method."""

    #: Anonymous bytes and file pages, for a model on the host.
    host: Callable[[Subject], tuple[int, int]]
    #: Anonymous bytes and file pages on the host, for a model on an accelerator; bytes of each tensor there.
    device: Callable[[Subject], tuple[int, int, Sequence[int]]]
    #: Formats that it reads, and the requirement that others do not meet.
    formats: tuple[str, ...] = ("torch-zip", "torch-legacy")
    needs: str = "needs one torch.save file (torch-legacy or torch-zip)"


#: The methods of a well-known tutorial on memory-efficient loading, in its order.
METHODS: Mapping[str, _Method] = {
    "naive": _Method(
        host=lambda s: (max(s.built, s.final + s.loaded), 0),
        device=lambda s: (max(s.built, s.largest_storage), 0, [*s.finals, *s.storages]),
    ),
    "sequential": _Method(
        host=lambda s: (max(s.built, s.final + s.loaded), 0),
        device=lambda s: (max(s.built, s.loaded), 0, [*s.finals, s.largest_in_file]),
    ),
    "meta-sequential": _Method(
        host=lambda s: (s.final + s.loaded, 0),
        device=lambda s: (s.largest_storage, 0, [*s.finals, *s.storages]),
    ),
    "mmap": _Method(
        host=lambda s: (s.final if s.cast else 0, s.in_file),
        device=lambda s: (0, s.loaded, [*s.storages, s.cast]),
        formats=("torch-zip",),
        needs="needs one torch.save file (torch-zip)",
    ),
    "per-parameter": _Method(
        host=lambda s: (s.final + s.largest_in_file, 0),
        device=lambda s: (s.largest_in_file + s.cast, 0, s.finals),
        formats=("per-parameter",),
        needs="needs one file for each parameter",
    ),
}


class MethodVerdict(Struct, frozen=True, kw_only=True):
    """Predicted memory of one loading method, and whether it fits."""

    #: Name of the method: ``"naive"``, ``"mmap"``, ``"sluice"``, ...
    method: str
    #: Predicted growth of host memory in bytes, from before the model exists until every weight was accessed.
    host: Peaks
    #: The same of the reserved bytes of each accelerator, by device.
    devices: Mapping[str, int]
    #: Whether it stays within the limits. File pages do not count, because the kernel can reclaim them.
    fits: bool
    #: Shortages, or other restrictions; empty if there are none.
    remark: str
    #: Requirement that the load does not meet, or empty. The figures then assume weights in the required form.
    needs: str

    @property
    def possible(self) -> bool:
        """Whether it fits and its requirements are met."""
        return self.fits and not self.needs

    @property
    def peak_bytes(self) -> int:
        """Peak of host and accelerators together."""
        return self.host.total_bytes + sum(self.devices.values())

    @property
    def figures(self) -> str:
        """Its peaks, for sentences."""
        peaks = {"the host": self.host.total_bytes, **self.devices}
        return " and ".join(f"{format_bytes(nbytes)} on {where}" for where, nbytes in peaks.items())


def predict(name: str, subject: Subject) -> tuple[tuple[int, int], dict[str, int], str]:
    """Return what ``judge`` needs about one of ``METHODS``: growth of host and devices, and the requirement not met."""
    method, device = METHODS[name], subject.devices[0]
    anon, file, tensors = method.device(subject) if device != "cpu" else (*method.host(subject), ())
    reserved = plan_reservation(tensors, one_block=False).reserved_bytes
    needs = "" if subject.file_format in method.formats else method.needs
    if len(subject.devices) > 1:
        needs = "puts the whole model on one device"
    return (anon + defaults.METHOD_OVERHEAD_BYTES, file), {device: reserved} if device != "cpu" else {}, needs


def judge(
    name: str,
    host: tuple[int, int],
    devices: Mapping[str, int],
    needs: str,
    *,
    limits: Sequence[MemoryLimit],
    resident: Mapping[str, int],
) -> MethodVerdict:
    """Return the verdict on a method, from its predicted growth of anonymous memory and of file pages.

    ``limits`` are those on the growth of memory from now on; ``resident`` has the bytes of the model that are already
    in memory, by the names of the limits, which are not needed again.
    """
    anon, file = host
    needed = {HOST: anon, **devices}
    short = [
        f"{format_bytes(excess)} of {each.where} memory short ({each.origin})"
        for each in limits
        if (excess := needed.get(each.where, 0) - each.nbytes - resident.get(each.where, 0)) > 0
    ]
    room = next(each.nbytes for each in limits if each.where == HOST) + resident.get(HOST, 0)
    remark = "; ".join(short)
    if not short and file and anon + file > room:
        remark = "its file pages do not all stay in memory: evicted pages are read again when they are used"
    peaks = Peaks(anon_bytes=anon, file_bytes=file, shmem_bytes=0, total_bytes=anon + file)
    return MethodVerdict(method=name, host=peaks, devices=dict(devices), fits=not short, remark=remark, needs=needs)


def recommend(verdicts: Sequence[MethodVerdict]) -> tuple[str | None, str]:
    """Return the recommended method, or None if nothing fits, and the reason.

    The order is: copies by sluice, mapping by sluice, the leanest other method. Methods that hold a small model twice
    can take less than staging; but sluice checks everything before it changes the model, and leaves no file mapped.
    """
    leanest_first = sorted(verdicts, key=lambda verdict: verdict.peak_bytes)
    possible = {verdict.method: verdict for verdict in leanest_first if verdict.possible}
    if not possible:
        least = leanest_first[0]
        return None, f"nothing fits: {least.method} takes the least, {least.figures}; {least.remark or least.needs}"
    if COPY not in possible and MAP in possible:
        return MAP, "copied weights do not fit; mapped pages of the file are evicted when memory is short"
    if COPY not in possible:
        best = next(iter(possible.values()))
        return best.method, f"it takes the least memory of the methods that fit: {best.figures}"
    too_large = [each.method for each in verdicts if not (each.fits or each.method.startswith(COPY))]
    other = next((verdict for name, verdict in possible.items() if not name.startswith(COPY)), None)
    parts = [f"it fits and takes {possible[COPY].figures}"]
    if other is None:
        parts += [] if too_large else ["no other method supports this load"]
    elif other.peak_bytes < possible[COPY].peak_bytes:
        flaw = "keeps the file mapped" if other.method == "mmap" else "checks less before it changes the model"
        parts.append(f"{other.method} takes less, {other.figures}, but {flaw}")
    else:
        parts.append(f"the leanest other method that reads this file, {other.method}, takes {other.figures}")
    return COPY, "; ".join([*parts, *([f"{', '.join(too_large)} would not fit"] if too_large else [])])
