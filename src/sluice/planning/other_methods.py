"""Other methods to load a model: formulas for their memory peaks and times.

The methods are those of a well-known tutorial on memory-efficient loading. Each counts from the construction of the
model until every weight was accessed. ``L`` is the bytes that ``torch.load`` reads (the whole file, with optimizer
states), ``B`` the model after its constructor, ``F`` the finished model, ``C`` the bytes of its weights in the file.

method            on the host                          on an accelerator
----------------  -----------------------------------  -------------------------------------------------------
naive             max(B and the cast of it, F + L)     host max(B, largest of L); device F + L
sequential        the same                             host max(B, L); device F + largest of C
meta-sequential   F + L                                host largest of L; device F + L
mmap              C as file pages, and F when cast     host C as file pages; device L, and the cast of it
per-parameter     F + largest of C                     host largest of C; device F

Casts of one parameter at a time are simulated step by step. Device figures are the reserved bytes of torch's allocator.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from sluice import _defaults as defaults
from sluice.planning.cuda_allocator import plan_reservation
from sluice.records import Peaks

__all__ = ["METHODS", "Forecast", "LoadingMethod", "Rates", "Subject", "Weight", "forecast"]


class Weight(Struct, frozen=True, kw_only=True):
    """One tensor of a model, in bytes."""

    #: Bytes in the checkpoint; 0 if it is not there.
    file_bytes: int
    #: Bytes after construction.
    built_bytes: int
    #: Bytes when finished.
    final_bytes: int

    @property
    def cast(self) -> bool:
        """Whether the dtype changes between construction and the finished tensor."""
        return self.built_bytes != self.final_bytes


class Subject(Struct, frozen=True, kw_only=True):
    """The properties of a model and its checkpoint that the formulas need."""

    #: Tensors of the model, in its order.
    weights: tuple[Weight, ...]
    #: Bytes of each storage of the checkpoint, all of which ``torch.load`` reads.
    storages: tuple[int, ...]
    #: Name of the format, equal to ``Checkpoint.format``.
    format: str
    #: Number of files.
    files: int
    #: The single device of the finished model; ``"cpu"`` is the host.
    device: str
    #: Whether the model is placed on several devices, which none of the methods supports.
    several_devices: bool = False

    @property
    def final_bytes(self) -> int:
        """``F``: bytes of the finished model."""
        return sum(weight.final_bytes for weight in self.weights)

    @property
    def built_bytes(self) -> int:
        """``B``: bytes of the model after its constructor."""
        return sum(weight.built_bytes for weight in self.weights)

    @property
    def file_bytes(self) -> int:
        """``C``: bytes of the weights in the file."""
        return sum(weight.file_bytes for weight in self.weights)

    @property
    def loaded_bytes(self) -> int:
        """``L``: bytes that ``torch.load`` reads."""
        return sum(self.storages)

    @property
    def cast(self) -> bool:
        """Whether the dtype of any weight changes between the file and the finished model."""
        return any(weight.file_bytes not in {0, weight.final_bytes} for weight in self.weights)


class Rates(Struct, frozen=True, kw_only=True):
    """Measured rates of the steps of a load on this machine, in bytes per second."""

    #: sluice: read, cast and place, with all readers.
    sluice: float
    #: One thread through the page cache into new memory, as ``torch.load`` reads.
    serial: float
    #: Random numbers into new memory, as in constructors.
    initialise: float
    #: Copies from memory to memory.
    copy: float
    #: Transfers from the host to the accelerator; None without an accelerator.
    bus: float | None = None
    #: Whether the bytes read were in the page cache.
    cached: bool = False


class Forecast(Struct, frozen=True, kw_only=True):
    """Predicted memory and time of one method."""

    #: Name of the method.
    method: str
    #: Growth of host memory.
    host: Peaks
    #: Growth of torch's reserved bytes on the accelerator; 0 on the host.
    device_bytes: int = 0
    #: Estimated seconds; None if the machine was not probed.
    seconds: float | None = None
    #: Requirement of the method that the load does not meet; empty if it meets all. The figures then assume the same
    #: weights in the required form.
    needs: str = ""


class LoadingMethod(Struct, frozen=True, kw_only=True):
    """One method to load a model."""

    #: Name in benchmarks and tables.
    name: str
    #: Description.
    how: str
    #: Function that predicts its peaks in bytes: anonymous memory, file pages, device memory.
    peaks: Callable[[Subject], tuple[int, int, int]]
    #: Function that predicts its seconds.
    seconds: Callable[[Subject, Rates], float]
    #: Formats of a single file that it reads; None for one file per parameter.
    formats: frozenset[str] | None = frozenset({"torch-zip", "torch-legacy"})


def forecast(method: LoadingMethod, subject: Subject, rates: Rates | None = None) -> Forecast:
    """Return the predicted memory and time of one method.

    Args:
        method: One of ``METHODS``.
        subject: The model and its checkpoint.
        rates: Rates of the machine; None for no estimate of time.
    """
    anon, file, device = method.peaks(subject)
    anon += defaults.METHOD_OVERHEAD_BYTES
    return Forecast(
        method=method.name,
        host=Peaks(anon_bytes=anon, file_bytes=file, shmem_bytes=0, total_bytes=anon + file),
        device_bytes=device,
        seconds=None if rates is None else method.seconds(subject, rates),
        needs=_needs(method, subject),
    )


def _needs(method: LoadingMethod, subject: Subject) -> str:
    """Return the requirement of the method that the load does not meet, or an empty text."""
    if subject.several_devices:
        return "puts the whole model on one device"
    if method.formats is None:
        return "" if subject.format == "per-parameter" else "needs one file for each parameter"
    if subject.format not in method.formats or subject.files != 1:
        return f"needs one torch.save file ({' or '.join(sorted(method.formats))})"
    return ""


def _on_host(subject: Subject) -> bool:
    return subject.device == "cpu"


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


def _largest_in_file(subject: Subject) -> int:
    return _largest(weight.file_bytes for weight in subject.weights)


def _reserved(*sizes: Iterable[int]) -> int:
    """Return the bytes that torch's allocator reserves for tensors that are allocated one by one and kept."""
    return plan_reservation((size for group in sizes for size in group), one_block=False).reserved_bytes


def _finals(subject: Subject) -> list[int]:
    return [weight.final_bytes for weight in subject.weights]


def _cast_peak(steps: Sequence[tuple[int, int]]) -> int:
    """Return the peak bytes of tensors that are replaced in sequence, each complete before the old one is freed.

    Args:
        steps: Bytes of each tensor before and after.
    """
    held = peak = sum(before for before, _ in steps)
    for before, after in steps:
        if before != after:
            peak = max(peak, held + after)
            held += after - before
    return peak


def _built_peak(subject: Subject) -> int:
    """Return the peak bytes on the host while the model is built there and cast."""
    return _cast_peak([(weight.built_bytes, weight.final_bytes) for weight in subject.weights])


def _built_then_moved(subject: Subject) -> int:
    """Return the peak bytes on the host while the model is built there and moved; a cast copies before the transfer."""
    cast = _largest(weight.final_bytes for weight in subject.weights if weight.cast)
    return subject.built_bytes + cast


def _naive(subject: Subject) -> tuple[int, int, int]:
    if _on_host(subject):
        return max(_built_peak(subject), subject.final_bytes + subject.loaded_bytes), 0, 0
    host = max(_built_then_moved(subject), _largest(subject.storages))
    return host, 0, _reserved(_finals(subject), subject.storages)


def _sequential(subject: Subject) -> tuple[int, int, int]:
    if _on_host(subject):
        return _naive(subject)
    host = max(_built_then_moved(subject), subject.loaded_bytes)
    return host, 0, _reserved(_finals(subject), [_largest_in_file(subject)])


def _meta_sequential(subject: Subject) -> tuple[int, int, int]:
    if _on_host(subject):
        return subject.final_bytes + subject.loaded_bytes, 0, 0
    return _largest(subject.storages), 0, _reserved(_finals(subject), subject.storages)


def _mmap(subject: Subject) -> tuple[int, int, int]:
    if _on_host(subject):
        return (subject.final_bytes if subject.cast else 0), subject.file_bytes, 0
    steps = [(weight.file_bytes or weight.final_bytes, weight.final_bytes) for weight in subject.weights]
    more = _cast_peak(steps) - sum(before for before, _ in steps)
    return 0, subject.loaded_bytes, _reserved(subject.storages, [more])


def _per_parameter(subject: Subject) -> tuple[int, int, int]:
    if _on_host(subject):
        return subject.final_bytes + _largest_in_file(subject), 0, 0
    cast = _largest(weight.final_bytes for weight in subject.weights if weight.file_bytes != weight.final_bytes)
    return _largest_in_file(subject) + cast, 0, _reserved(_finals(subject))


def _bus_seconds(subject: Subject, rates: Rates, nbytes: int) -> float:
    return 0.0 if _on_host(subject) else nbytes / (rates.bus or rates.copy)


def _naive_seconds(subject: Subject, rates: Rates) -> float:
    built = subject.built_bytes / rates.initialise + (subject.built_bytes / rates.copy if _casts_built(subject) else 0)
    moved = _bus_seconds(subject, rates, subject.final_bytes)
    return built + moved + _meta_sequential_seconds(subject, rates)


def _casts_built(subject: Subject) -> bool:
    return any(weight.cast for weight in subject.weights)


def _meta_sequential_seconds(subject: Subject, rates: Rates) -> float:
    read = subject.loaded_bytes / rates.serial
    return read + _bus_seconds(subject, rates, subject.loaded_bytes) + subject.file_bytes / rates.copy


def _mmap_seconds(subject: Subject, rates: Rates) -> float:
    # Cached pages are only mapped, sixteen at a time, which takes about half the time of a copy.
    accessed = subject.file_bytes / (2 * rates.copy if rates.cached else rates.serial)
    cast = subject.file_bytes / rates.copy if subject.cast else 0.0
    return accessed + cast + _bus_seconds(subject, rates, subject.loaded_bytes)


#: The methods, in the order of the tutorial.
METHODS = (
    LoadingMethod(
        name="naive", how="load_state_dict(torch.load()) into a real model", peaks=_naive, seconds=_naive_seconds
    ),
    LoadingMethod(
        name="sequential",
        how="state dict on the host, copied parameter by parameter into a real model",
        peaks=_sequential,
        seconds=_naive_seconds,
    ),
    LoadingMethod(
        name="meta-sequential",
        how="to_empty() instead of initial values, then parameter by parameter",
        peaks=_meta_sequential,
        seconds=_meta_sequential_seconds,
    ),
    LoadingMethod(
        name="mmap",
        how="torch.load(mmap=True) into a meta model with assign=True",
        peaks=_mmap,
        seconds=_mmap_seconds,
        formats=frozenset({"torch-zip"}),
    ),
    LoadingMethod(
        name="per-parameter",
        how="one small file after another into a model from to_empty()",
        peaks=_per_parameter,
        seconds=_meta_sequential_seconds,
        formats=None,
    ),
)
