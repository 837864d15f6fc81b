"""Targets that are parts of output files: what the engine reads is written, cast if needed.

Bytes that do not change are written directly from the staging buffer. Other elements go through a small scratch buffer
in the order of the target, and each contiguous run is written from there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice.engine.host_copies import BITS, StridedBytes, constant_bytes, copy_in_pieces, staged_bytes
from sluice.engine.host_memory import HostMemory
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.engine.targets import swap_bytes
from sluice.entries.slicing import boxes, slice_view
from sluice.records import Constant, Copy, LoadPlan, Packing, Read
from sluice.sources.protocol import Source

__all__ = ["FileTargets"]


class FileTargets:
    """The targets of one plan, each a part of an output file; see ``TargetMemory``."""

    def __init__(self, plan: LoadPlan, write: Callable[[int, int, memoryview], None]) -> None:
        """Write nothing yet.

        Args:
            plan: From ``plan_stream``.
            write: Called as ``write(position, offset, data)`` to write a piece of a target, with the byte offset in it.
                Called from any thread, once for each byte.
        """
        self._plan = plan
        self._write_piece = write
        self._scratch: queue.SimpleQueue[HostMemory] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: Bytes written so far.
        self.written = 0

    def map_files(self, sources: Sequence[Source]) -> None:
        """Do nothing: output files are not mapped."""

    def begin(self, staging: StagingPool) -> None:  # noqa: ARG002  (only accelerators use it)
        """Write the constants, which are not read from any file."""
        with torch.inference_mode(mode=False), torch.no_grad():
            for position, target in enumerate(self._plan.targets):
                for constant in target.constants:
                    self._write_constant(position, constant)

    def window(self, position: int, offset: int, nbytes: int) -> memoryview:
        """Refuse: an output file is not memory."""
        raise NotImplementedError(f"target {position} is not memory")

    def copy_out(self, read: Read, buffer: StagingBuffer, first: int) -> None:
        """Write strided boxes of a staging buffer to their targets."""
        for copy in read.copies[: read.copies_before_swaps]:
            self._write_copy(copy, buffer, first)
        for swap in read.swaps:
            swap_bytes(swap, buffer, first)
        for copy in read.copies[read.copies_before_swaps :]:
            self._write_copy(copy, buffer, first)

    def complete(self, position: int) -> None:
        """Do nothing: output files have no finishers."""

    def finish(self) -> None:
        """Do nothing: writes are complete when they return."""

    def _write_copy(self, copy: Copy, buffer: StagingBuffer, first: int) -> None:
        if self._is_verbatim(copy):
            start = first + copy.offset
            nbytes = copy.shape[0] * ITEM_BYTES[copy.dtype]
            at = copy.target_start * ITEM_BYTES[copy.dtype]
            self._write(copy.target, at, buffer.view[start : start + nbytes])
        else:
            source = staged_bytes(copy, buffer, first, self._plan.targets[copy.target].dtype)
            self._write_box(copy.target, copy, source)

    def _is_verbatim(self, copy: Copy) -> bool:
        run = len(copy.shape) == 1 and copy.source_stride == copy.target_stride == (1,)
        return run and copy.dtype == self._plan.targets[copy.target].dtype and not copy.elements.computed

    def _write_constant(self, position: int, constant: Constant) -> None:
        self._write_box(position, constant, constant_bytes(constant))

    def _write_box(self, position: int, box: Copy | Constant, source: StridedBytes) -> None:
        """Write the elements of a box in the order of the target, a scratch at a time."""
        target = self._plan.targets[position]
        item = ITEM_BYTES[target.dtype]
        dtype = torch_dtype(target.dtype) if source.elements is not None else BITS[item]
        order = sorted(range(len(box.shape)), key=lambda dim: -box.target_stride[dim])
        shape, stride, steps = (
            tuple(values[dim] for dim in order) for values in (box.shape, source.stride, box.target_stride)
        )
        # The elements of a pack are one more dimension of the target.
        inner, inner_step = ((), ()) if source.packing is None else _in_pack(source.packing)
        with self._borrowed() as scratch:
            for key in boxes(shape, defaults.SCRATCH_BYTES // (item * prod(inner))):
                sizes, strides, begin = slice_view(shape, stride, key)
                _, _, landed = slice_view(shape, steps, key)
                written = (*sizes, *inner)
                out = torch.frombuffer(scratch.mapping, dtype=dtype, count=prod(written), offset=scratch.start)
                copy_in_pieces(out.view(written), source.part(sizes, strides, begin))
                held = scratch.view()
                for start, at, length in _runs(written, (*steps, *inner_step)):
                    piece = held[start * item : (start + length) * item]
                    self._write(position, (box.target_start + landed + at) * item, piece)

    @contextmanager
    def _borrowed(self) -> Iterator[HostMemory]:
        try:
            scratch = self._scratch.get_nowait()
        except queue.Empty:
            scratch = HostMemory(defaults.SCRATCH_BYTES, huge_pages=False)
        try:
            yield scratch
        finally:
            self._scratch.put(scratch)

    def _write(self, position: int, at: int, piece: memoryview) -> None:
        self._write_piece(position, at, piece)
        with self._lock:
            self.written += len(piece)


def _in_pack(packing: Packing) -> tuple[tuple[int], tuple[int]]:
    """Return size and step in the target of the elements that are taken from a pack."""
    return (packing.taken,), (packing.target_step,)


def _runs(shape: tuple[int, ...], stride: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first element, position in the target, length)`` of each contiguous run, in elements.

    Args:
        shape: Sizes of a row-major box, in elements.
        stride: Its steps in the target, in elements.
    """
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or stride[outer - 1] == length):
        length *= shape[outer - 1]
        outer -= 1
    first = 0
    for position in _positions(shape[:outer], stride[:outer]):
        yield first, position, length
        first += length


def _positions(shape: Sequence[int], stride: Sequence[int]) -> Iterator[int]:
    """Yield the place of each element of a strided box, in row-major order."""
    if not shape:
        yield 0
        return
    for index in range(shape[0]):
        for rest in _positions(shape[1:], stride[1:]):
            yield index * stride[0] + rest
