"""Small builders of facts, indexes and files for tests of planner and engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from msgspec.structs import replace

from sluice._dtypes import dtype_name
from sluice._options import PageCache
from sluice.engine.running_plan import RunResult, TargetMemory
from sluice.engine.session import Session
from sluice.engine.targets import Targets
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
from sluice.sources.pages import FileWatch
from sluice.sources.protocol import Source
from support.fake_accelerator import FakeAccelerator

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


def write_storages(path: Path, tensors: list[torch.Tensor], *, shift: int = 0) -> list[tuple[int, int]]:
    """Write the storage of each tensor at a multiple of 64 plus ``shift``; return the location of each."""
    places = []
    with path.open("wb") as file:
        for tensor in tensors:
            at = -(-file.tell() // 64) * 64 + shift
            file.write(bytes(at - file.tell()))
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
            file.write(raw)
            places.append((at, len(raw)))
    return places


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


def execute(
    plan: LoadPlan,
    sources: Sequence[Source],
    targets: TargetMemory,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> RunResult:
    with closing(Session(sources)) as session:
        return session.start(plan, targets).wait(progress=progress, completed=completed)


def load(
    path: Path,
    tensors: Sequence[torch.Tensor],
    requests: list[Request],
    *,
    shift: int = 0,
    swap_bytes: Sequence[int] = (),
    share: bool = False,
    cached: bool = True,
    existing: dict[int, torch.Tensor] | None = None,
    fake: FakeAccelerator | None = None,
    cores: int = 2,
    staging: int = MIB,
) -> list[torch.Tensor]:
    """Write the storages of tensors to a file, and return the tensors of requests for them.

    Args:
        path: The file.
        tensors: Tensors with one storage each.
        requests: What to read.
        shift: Bytes from a multiple of 64 to the first of each storage.
        swap_bytes: Bytes of the numbers of each storage that are in the other order.
        share: Whether views of the same bytes share memory.
        cached: Whether the file counts as cached.
        existing: Memory of some requests.
        fake: The device ``fake:0``; each of its bytes was filled once.
        cores: Processors of the machine.
        staging: Bytes of all staging buffers.
    """
    with Stored(path, list(tensors), shift=shift) as stored:
        if swap_bytes:
            swapped = zip(stored.index.storages, swap_bytes, strict=True)
            storages = tuple(replace(each, swap_bytes=nbytes) for each, nbytes in swapped)
            stored.index = replace(stored.index, storages=storages)
        plan, views = stored.plan_of(requests, facts(cached=cached, cores=cores), staging=staging, share=share)
        memory = Targets(plan, existing, accelerators={"fake:0": fake} if fake else {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileWatch, "cached_share", lambda *_: float(cached))  # although it has just been written
            execute(plan, [stored.source], memory)
    if fake:
        fake.assert_filled_once()
    return memory.tensors(views)


def use_of_ring(plan: LoadPlan, *, read_rate: float, copy_rate: float) -> float:
    """Run the staged reads of a plan as the engine does, in virtual time; return when the slower of both works.

    Rates are bytes per unit of time for the disk and for copies; the result is a fraction of all time.

    The disk has its full rate if as many requests are under way as readers and buffers allow. A copy starts when its
    read has ended and the copies before it are done. A buffer is lent again, oldest first, when its copy has read it.
    """
    readers = max(1, min(plan.readers, plan.staging_buffers))
    free_at = [0.0] * plan.staging_buffers  # when each free buffer can be written again, in the order of their return
    turns = [(0.0, reader) for reader in range(readers)]  # when each reader takes its next read
    heapq.heapify(turns)
    finished: list[tuple[float, int]] = []  # reads under way: end, bytes
    copies_end = reading = copying = 0.0
    pending = [read.nbytes for read in plan.reads if read.into is None]
    for nbytes in pending:
        now, reader = heapq.heappop(turns)
        while finished and (finished[0][0] <= now or not free_at):
            copies_end = _copy_out(heapq.heappop(finished), copies_end, copy_rate, free_at)
        start = max(now, free_at.pop(0))
        end = start + nbytes / (read_rate / readers)
        heapq.heappush(finished, (end, nbytes))
        heapq.heappush(turns, (end, reader))
        reading += nbytes / read_rate
        copying += nbytes / copy_rate
    while finished:
        copies_end = _copy_out(heapq.heappop(finished), copies_end, copy_rate, free_at)
    return max(reading, copying) / copies_end


def _copy_out(read: tuple[float, int], copies_end: float, copy_rate: float, free_at: list[float]) -> float:
    end = max(read[0], copies_end) + read[1] / copy_rate
    free_at.append(end)
    return end


def keys_of(tensor: torch.Tensor) -> st.SearchStrategy[Any]:
    """Draw keys that torch takes for a tensor: without negative steps."""

    def steps_back(key: object) -> bool:
        keys = key if isinstance(key, tuple) else (key,)
        return any(isinstance(one, slice) and one.step is not None and one.step < 0 for one in keys)

    return basic_indices(tuple(tensor.shape), allow_newaxis=True).filter(lambda key: not steps_back(key))
