"""Final memory on the host and on accelerators, and the copies that reach it.

Host targets are tensors over our own mappings, made with ``torch.frombuffer`` at their exact bytes: slices of one
large byte tensor would drag its whole storage along when they are saved or shared. Equal dtypes are copied as
integers of the same size, so that every bit arrives, also those that no value of the dtype has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice.engine.accelerators import Accelerator, accelerator, page_locked
from sluice.engine.host_copies import StridedBytes, constant_bytes, copy_in_pieces, staged_bytes
from sluice.engine.host_memory import HostMemory, PageSizes
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.records import Constant, Copy, LoadPlan, Read, View, elements_of
from sluice.records.geometry import span_elements
from sluice.sources.protocol import MappableSource, Source

__all__ = ["Targets"]

#: Least bytes for each copy of a read without staging: the call needs a record of each place.
_STRAIGHT_BYTES = 4096

#: Most places of one call, less those of gaps and the last copy; Linux and macOS take 1024.
_MOST_BUFFERS = 1000


class Targets:
    """The final memory of one plan: large targets are mapped when it begins, small ones when bytes arrive."""

    def __init__(
        self,
        plan: LoadPlan,
        existing: Mapping[int, torch.Tensor] | None = None,
        *,
        accelerators: Mapping[str, Accelerator] | None = None,
        finishers: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        take_memory: Callable[[int], HostMemory] | None = None,
    ) -> None:
        """Prepare targets without allocating memory.

        Args:
            plan: The plan; ``Block.kind == "existing"`` targets must all be in ``existing``.
            existing: Live tensors to fill in place, by target position.
            accelerators: The devices of the plan by name; None takes torch's.
            finishers: The functions that the finishers of the plan name. Each gets a whole weight and returns the
                tensor that takes its place; the memory of the weight is freed unless the result shares it.
            take_memory: Returns host memory of at least as many bytes, with any content; None maps new memory.
        """
        self._plan = plan
        self._finishers = {} if finishers is None else finishers
        self._finished: dict[int, torch.Tensor] = {}
        self._take_memory = take_memory
        if accelerators is None:
            accelerators = {device.device: accelerator(device.device) for device in plan.devices}
        self._accelerators = accelerators
        live = (existing or {}).items()  # whose history is left out
        self._existing = {i: _plain(each) if each.is_inference() else each.detach() for i, each in live}
        self._mappings: dict[int, HostMemory] = {}
        self._arenas: dict[int, HostMemory] = {}
        self._ranges: list[tuple[mmap.mmap, int]] = []
        self._flats: dict[int, torch.Tensor] = {}
        self._lock = threading.RLock()
        self._arena_lock = threading.Lock()
        # Memory that is used again and again stays on huge pages: direct reads into them are faster.
        self._pages = PageSizes() if take_memory is None else None
        self._reserved = False
        self._begun: list[Accelerator] = []
        #: Positions of live tensors that bytes were read or copied into.
        self.touched: set[int] = set()

    def window(self, position: int, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes of a host target from ``offset``, for reads without staging.

        ``offset`` may be negative down to the target's lead, and the end may pass the target's up to its last block:
        direct reads take whole blocks.
        """
        if position in self._existing:
            self.touched.add(position)
            tensor = self._existing[position]
            total = self._plan.targets[position].nbytes
            # Reads without staging are planned only for dense memory, in any order of dimensions.
            raw = (ctypes.c_char * total).from_address(tensor.data_ptr())
            return memoryview(raw).cast("B")[offset : offset + nbytes]
        memory = self._mapping(position)
        start = self._plan.blocks[position].offset + offset
        if self._pages is not None:
            self._pages.choose(memory, start, nbytes)
        return memory.view()[start : start + nbytes]

    def map_files(self, sources: Sequence[Source]) -> None:
        """Map the file ranges that the plan maps; their pages are loaded when first touched."""
        for each in self._plan.mapped_ranges:
            source = cast("MappableSource", sources[each.file])  # the planner was told which are
            self._ranges.append(source.map(each.offset, each.nbytes))

    def begin(self, staging: StagingPool | None = None) -> None:
        """Prepare accelerators for copies out of ``staging``. ``finish`` must always be called afterwards."""
        if staging is not None and self._plan.devices:
            staging.page_lock(lambda memory: page_locked(memory, self._accelerators))
            for device in self._plan.devices:
                link = self._accelerators[device.device]
                self._begun.append(link)
                link.begin(self._plan.device_scratch_bytes)
            self.reserve()
            self._allocate_lasting()
        # Large targets, before readers start: a mapping waits for all page faults under way, and new faults wait for a
        # mapping. Finishers free theirs early.
        unread: list[int] = []
        for position, (target, block) in enumerate(zip(self._plan.targets, self._plan.blocks, strict=True)):
            if block.kind == "mapping" and target.finisher is None:
                self._mapping(position)
            if target.constants and not target.fills:
                unread.append(position)
        if unread:  # no read allocates them
            with torch.inference_mode(mode=False), torch.no_grad():
                for position in unread:
                    self._flat(position)

    def _allocate_lasting(self) -> None:
        """Allocate what stays on devices whose finishers free weights early.

        Later, a weight that is about to be freed could take the memory that was reserved for it.
        """
        devices = {target.device for target in self._plan.targets if target.finisher} - {"cpu"}
        for position, target in enumerate(self._plan.targets if devices else ()):
            if target.device in devices and target.finisher is None:
                self._flat(position)

    def reserve(self) -> None:
        """Reserve the memory of accelerators, once, before the first tensor of the plan is allocated."""
        for device in () if self._reserved else self._plan.devices:
            if device.reservation.block_bytes:
                self._accelerators[device.device].reserve(device.reservation.block_bytes)
        self._reserved = True

    def finish(self) -> None:
        """Return once every copy is done, whether the load succeeded or not. After an interrupt, call it again."""
        failure: Exception | None = None
        while self._begun:
            try:
                self._begun[-1].finish()
            except Exception as error:  # noqa: BLE001  (raised below: the other devices have to finish too)
                failure = failure or error
            self._begun.pop()
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Free everything that was allocated, after a load that failed."""
        for held in (self._flats, self._mappings, self._arenas, self._ranges, self._finished):
            held.clear()
        for link in self._accelerators.values():
            link.release()

    def copy_out(self, read: Read, buffer: StagingBuffer, first: int) -> None:
        """Copy strided boxes from a staging buffer to their targets, cast if the dtypes differ.

        Copies to accelerators may continue after the return; the buffer keeps their tickets.

        Args:
            read: What to copy.
            buffer: The buffer that it was read into.
            first: Where its first byte lies in the buffer.
        """
        started: set[str] = set()
        if read.swap_bytes:  # reverse the bytes of each number
            numbers, count = np.dtype(f"u{read.swap_bytes}"), read.nbytes // read.swap_bytes
            np.frombuffer(buffer.memory, numbers, count, buffer.start + first).byteswap(inplace=True)
        others: list[Copy] = []
        for copy in read.copies:
            address = self._address(copy)
            if address is None:
                others.append(copy)
                continue
            # Without tensors, with which the copy of a kilobyte takes 15 times as long.
            if copy.target in self._existing:
                self.touched.add(copy.target)
            nbytes = copy.shape[0] * ITEM_BYTES[copy.elements.dtype]
            ctypes.memmove(address, buffer.address + first + copy.offset, nbytes)
        if not others:
            return
        try:
            # Grad and inference mode belong to each thread: parameters made of inference tensors could not be trained.
            with torch.inference_mode(mode=False), torch.no_grad():
                for copy in others:
                    self._copy(copy, buffer, first, started)
        finally:  # after a failure too: earlier copies are still under way
            tickets = [self._accelerators[device].mark() for device in started]
            buffer.tickets.extend(ticket for ticket in tickets if ticket is not None)

    def _copy(self, copy: Copy, buffer: StagingBuffer, first: int, started: set[str]) -> None:
        """Copy one box, or start to; ``started`` gets the device that still reads from the buffer."""
        if copy.target in self._existing:
            self.touched.add(copy.target)
        target = self._plan.targets[copy.target]
        source = staged_bytes(copy, buffer, first, target.dtype)
        box = _box(self._flat(copy.target), copy)
        memory = self._mappings.get(copy.target)
        if self._pages is not None and memory is not None:
            nbytes = span_elements(box.shape, box.stride()) * box.element_size()
            self._pages.choose(memory, box.data_ptr() - memory.address, nbytes)
        if copy.dtype == target.dtype and not copy.elements.computed:
            box = box.view(source.dtype)
        if target.device != "cpu":
            started.add(target.device)
        self._send(target.device, box, source)

    def _address(self, copy: Copy) -> int | None:
        """Return where unchanged bytes go in small memory of the host; None if a copy is anything else."""
        target, block = self._plan.targets[copy.target], self._plan.blocks[copy.target]
        contiguous = copy.source_stride == copy.target_stride == (1,)
        if not contiguous or copy.elements != elements_of(target.dtype) or target.constants:
            return None
        first = copy.target_start * ITEM_BYTES[target.dtype]
        if block.kind == "arena":
            return self._arena(block.memory).address + block.offset + first
        small = block.kind == "existing" and target.device == "cpu" and target.nbytes < defaults.OWN_MAPPING_BYTES
        return self._existing[copy.target].data_ptr() + first if small else None

    def read_straight(self, source: Source, read: Read) -> bool:
        """Read bytes that stay as they are into small memory, by one call; return whether that did all of the read."""
        if not hasattr(source, "lend") or read.nbytes < _STRAIGHT_BYTES * len(read.copies) or not hasattr(os, "preadv"):
            return False
        buffers: list[Any] = []
        end = 0
        for copy in read.copies:
            address = None if read.swap_bytes else self._address(copy)
            if address is None or copy.offset < end or len(buffers) > _MOST_BUFFERS:
                return False
            if copy.offset > end:
                buffers.append(bytearray(copy.offset - end))
            nbytes = copy.shape[0] * ITEM_BYTES[copy.elements.dtype]
            buffers.append((ctypes.c_char * nbytes).from_address(address))
            end = copy.offset + nbytes
        live, found = [copy.target for copy in read.copies if copy.target in self._existing], 1
        with source.lend() as descriptor:
            try:
                found = os.preadv(descriptor, buffers, read.offset)
            except OSError:
                found = 0
            finally:  # also if an interrupt comes
                self.touched.update(live if found else ())
        return found == read.nbytes

    def _send(self, device: str, target: torch.Tensor, source: StridedBytes) -> None:
        """Copy to a device, or start to."""
        if device == "cpu":
            copy_in_pieces(target, source)
        else:
            self._accelerators[device].copy(target, source)

    def complete(self, position: int) -> None:
        """Call the finisher of a target whose last byte has arrived, and free what it does not keep."""
        target = self._plan.targets[position]
        finisher = target.finisher
        if finisher is None:
            return
        whole = self._flat(position).view(finisher.shape)
        if target.device != "cpu":
            self._accelerators[target.device].order()
        with self._lock:
            del self._flats[position]
            self._mappings.pop(position, None)
        with torch.inference_mode(mode=False), torch.no_grad():
            self._finished[position] = self._finishers[finisher.name](whole)

    def tensors(self, views: Iterable[View]) -> list[torch.Tensor]:
        """Return finished tensors. Each shares its storage with the other views of its target and with nothing else."""
        # Parameters made of inference tensors could not be trained, so the caller's modes do not count here.
        with torch.inference_mode(mode=False), torch.no_grad():
            return [self._tensor(view) for view in views]

    def take(self, views: Sequence[View]) -> list[torch.Tensor]:
        """Return finished tensors and drop the targets' own references to their memory: nothing more can be asked.

        The last view of a target is the target's own tensor in another shape, which saves a second one for each.
        """
        if len(self._existing) == len(views):  # a live tensor has one view
            return [self._existing[view.target] for view in views]
        uses = [0] * len(self._plan.targets)
        for view in views:
            uses[view.target] += 1
        taken: list[torch.Tensor] = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for view in views:
                uses[view.target] -= 1
                taken.append(self._tensor(view) if uses[view.target] else self._last(view))
        return taken

    def _last(self, view: View) -> torch.Tensor:
        position = view.target
        if position in self._existing or position in self._finished:
            return self._tensor(view)
        flat = self._flats.pop(position, None)
        if flat is None:  # nothing needed a tensor of it before, so that it has no constants either
            flat = self._allocate(position)
        return flat if (view.shape, view.stride) == (flat.shape, (1,)) else _set(flat, flat, view)

    def _tensor(self, view: View) -> torch.Tensor:
        if view.target in self._existing:
            return self._existing[view.target]
        if view.target in self._finished:
            return self._finished[view.target]
        flat = self._flat(view.target)
        # set_ makes a tensor of its own; as_strided would make a view that keeps a base.
        return _set(torch.empty(0, dtype=flat.dtype, device=flat.device), flat, view)

    def _flat(self, position: int) -> torch.Tensor:
        """Return the memory of a target as one dimension, with its constants written; a live tensor keeps its shape."""
        with self._lock:
            if position not in self._flats:
                known = position in self._existing
                flat = self._flats[position] = self._existing[position] if known else self._allocate(position)
                target = self._plan.targets[position]
                for constant in target.constants:  # by the way that all bytes take: a device's own queue orders them
                    if known:
                        self.touched.add(position)
                    self._send(target.device, _box(flat, constant), constant_bytes(constant))
            return self._flats[position]

    def _allocate(self, position: int) -> torch.Tensor:
        target, block = self._plan.targets[position], self._plan.blocks[position]
        dtype = torch_dtype(target.dtype)
        count = target.nbytes // ITEM_BYTES[target.dtype]
        if target.device != "cpu":
            return self._accelerators[target.device].allocate(count, dtype)
        if block.kind == "empty":
            return torch.empty(0, dtype=dtype, device="cpu")
        if block.kind == "mapped":
            mapping, start = self._ranges[block.memory]
        else:
            memory = self._arena(block.memory) if block.kind == "arena" else self._mapping(position)
            mapping, start = memory.mapping, memory.start
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + block.offset)

    def _arena(self, number: int) -> HostMemory:
        memory = self._arenas.get(number)
        if memory is None:
            with self._arena_lock:
                memory = self._arenas.get(number)
                is_new = memory is None
                if memory is None:
                    memory = self._arenas[number] = self._new_memory(self._plan.arenas[number], huge_pages=False)
            if is_new:  # without the lock: another thread may already copy to it
                memory.populate()
        return memory

    def _mapping(self, position: int) -> HostMemory:
        with self._lock:
            if position not in self._mappings:
                nbytes = self._plan.blocks[position].offset + self._plan.targets[position].nbytes
                self._mappings[position] = self._new_memory(nbytes, huge_pages=self._plan.facts.huge_pages)
            return self._mappings[position]

    def _new_memory(self, nbytes: int, *, huge_pages: bool) -> HostMemory:
        return self._take_memory(nbytes) if self._take_memory else HostMemory(nbytes, huge_pages=huge_pages)


def _set(tensor: Any, flat: torch.Tensor, view: View) -> torch.Tensor:
    """Make a tensor a view of the memory of a different tensor, without a base."""
    # From the tensor: its untyped_storage() leaves an object that lives as long as the storage. torch's stubs have only
    # the form that takes a storage.
    seen: torch.Tensor = tensor.set_(flat, view.start, view.shape, view.stride)
    return seen


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of an inference tensor, which only its mode may change, as an ordinary tensor."""
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _box(flat: torch.Tensor, box: Copy | Constant) -> torch.Tensor:
    """Return the elements of a target that a copy or a constant writes; those of a pack are one more dimension."""
    shape, stride = box.shape, box.target_stride
    if (packing := box.elements.packing) is not None:
        shape, stride = (*shape, packing.elements), (*stride, packing.target_step)
    return flat.as_strided(shape, stride, flat.storage_offset() + box.target_start)
