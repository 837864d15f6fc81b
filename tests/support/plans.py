"""Small builders of facts, indexes and files for tests of planner and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from sluice._dtypes import dtype_name
from sluice._options import PageCache
from sluice.planning.memory_layout import shared_targets, single_targets
from sluice.planning.planner import plan_load
from sluice.records import (
    Entry,
    FileFacts,
    FileIdentity,
    FileRecord,
    Index,
    LoadPlan,
    MachineFacts,
    Request,
    Storage,
    View,
    elements_of,
)
from sluice.records.geometry import contiguous_stride, span_elements
from sluice.sources.local import LocalFile

IDENTITY = FileIdentity(device=1, inode=2, nbytes=1 << 40, mtime_ns=3, ctime_ns=4)
FILE = FileRecord(path="model.bin", identity=IDENTITY)
MIB = 1 << 20


def facts(
    *, cached: bool | None = None, direct_io: bool = True, files: int = 1, cores: int = 2, available: int = 1 << 36
) -> MachineFacts:
    """Return facts of a machine whose files are wholly cached, wholly cold, or (None) in an unknown state."""
    probes = () if cached is None else (cached,) * 200_000
    one = FileFacts(filesystem="ext4", direct_io=direct_io, probe_step_bytes=8 * MIB, cached=probes)
    return MachineFacts(
        cores=cores, memory_available_bytes=available, memory_limit_bytes=None, huge_pages=True, files=(one,) * files
    )


def entry(
    shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    storage: int = 0,
    start: int = 0,
    stride: tuple[int, ...] | None = None,
) -> Entry:
    return Entry(
        elements=elements_of(dtype),
        shape=shape,
        stride=contiguous_stride(shape) if stride is None else stride,
        storage=storage,
        storage_offset=start,
    )


def request(name: str, wanted: Entry, **changes: object) -> Request:
    values: dict[str, object] = {"name": name, "entry": wanted, "dtype": wanted.dtype, "device": "cpu", **changes}
    return Request(**values)  # type: ignore[arg-type]


def index_of(storages: list[tuple[int, int]], files: tuple[FileRecord, ...] = (FILE,)) -> Index:
    """Return an index of ``(offset, nbytes)`` storages of the first file."""
    made = tuple(
        Storage(file=0, offset=offset, nbytes=nbytes, key=str(i)) for i, (offset, nbytes) in enumerate(storages)
    )
    return Index(format="test", files=files, storages=made, tree={})


def write_storages(path: Path, tensors: list[torch.Tensor], *, gap: int = 64, shift: int = 0) -> list[tuple[int, int]]:
    """Write the storage of each tensor at a multiple of ``gap`` plus ``shift``; return the location of each."""
    places = []
    with path.open("wb") as file:
        for tensor in tensors:
            at = -(-file.tell() // gap) * gap + shift
            file.write(bytes(at - file.tell()))
            raw = _raw(tensor)
            file.write(raw)
            places.append((at, len(raw)))
    return places


def _raw(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def entry_of(tensor: torch.Tensor, storage: int) -> Entry:
    """Return the entry that describes a tensor's view of its storage."""
    assert span_elements(tensor.shape, tensor.stride()) <= tensor.untyped_storage().nbytes()
    return entry(
        tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        storage=storage,
        start=int(tensor.storage_offset()),
        stride=tensor.stride(),
    )


def planned(
    requests: list[Request],
    storages: list[tuple[int, int]],
    machine: MachineFacts,
    *,
    staging: int = 64 * MIB,
    page_cache: PageCache = "auto",
) -> LoadPlan:
    """Return the plan for requests of ``(offset, nbytes)`` storages of the first file."""
    targets, _ = single_targets(requests, index_of(storages), {})
    files = (FILE,) * len(machine.files)
    return plan_load(targets, files, machine, staging_bytes=staging, page_cache=page_cache)


class Stored:
    """Tensors in a file, each with a storage of its own, and plans that load some of them."""

    def __init__(self, path: Path, tensors: list[torch.Tensor], *, shift: int = 0) -> None:
        self.tensors = tensors
        places = write_storages(path, tensors, shift=shift)
        self.source = LocalFile(path)
        self.index = index_of(places, (FileRecord(path=str(path), identity=self.source.identity),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def plan(self, *numbers: int, **changes: Any) -> tuple[LoadPlan, tuple[View, ...]]:
        """Return the plan that loads tensors by their numbers, and their views; ``changes`` are those of requests."""
        wanted = [request(f"t{i}", entry_of(self.tensors[i], i), **changes) for i in numbers]
        return self.plan_of(wanted)

    def plan_of(
        self,
        wanted: list[Request],
        machine: MachineFacts | None = None,
        *,
        staging: int = 8 * MIB,
        page_cache: PageCache = "auto",
        share: bool = False,
    ) -> tuple[LoadPlan, tuple[View, ...]]:
        targets, views = (shared_targets if share else single_targets)(wanted, self.index, {})
        machine = machine or facts(cached=False)
        plan = plan_load(targets, self.index.files, machine, staging_bytes=staging, page_cache=page_cache)
        return plan, views
