"""A fake accelerator for tests on machines without one, with the worst behavior of an asynchronous device.

Its memory is host memory. Copies run on a separate thread, late and in random order. It reports copies whose source
changed after they were started, and elements that arrive twice or never.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from dataclasses import dataclass

import torch

from sluice.engine.accelerators import Accelerator
from sluice.engine.host_copies import StridedBytes
from sluice.engine.packs import compute, decode_packs

#: Byte that fills uninitialised memory.
_UNTOUCHED = 0xA5

#: Byte that fills a staging buffer after its copies are done.
_POISON = 0xDB


@dataclass(eq=False)
class _PendingCopy:
    """A started copy."""

    target: torch.Tensor
    source: StridedBytes
    checksum: int
    done: threading.Event
    lock: threading.Lock
    poisoned: bool = False

    def poison(self) -> None:
        """Overwrite its source, once: a later ticket may name it too, when the buffer is already in use again."""
        with self.lock:
            if not self.poisoned:
                self.source.raw.fill_(_POISON)
                self.poisoned = True


class FakeAccelerator(Accelerator):
    """A fake accelerator; ``finish`` raises ``AssertionError`` with the problems that it found.

    Args:
        seed: Seed of the order and the delays of copies.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__("cpu")
        self._random = random.Random(seed)
        self._condition = threading.Condition()
        self._pending: list[_PendingCopy] = []
        self._problems: list[str] = []
        self._arrived: dict[int, torch.Tensor] = {}
        self._worker: threading.Thread | None = None
        self._stopping = False
        self.reserved_bytes: list[int] = []
        self.allocated_bytes = 0

    def begin(self, scratch_bytes: int) -> None:  # noqa: ARG002  (its memory is the host's: no scratch)
        self._stopping = False
        self._worker = threading.Thread(target=self._work, name="fake-accelerator", daemon=True)
        self._worker.start()

    def reserve(self, nbytes: int) -> None:
        self.reserved_bytes.append(nbytes)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = count * dtype.itemsize
        self.allocated_bytes += nbytes
        memory = torch.full((nbytes,), _UNTOUCHED, dtype=torch.uint8).view(dtype)
        self._arrived[memory.untyped_storage().data_ptr()] = torch.zeros(count, dtype=torch.int32)
        return memory

    def copy(self, target: torch.Tensor, source: StridedBytes) -> None:
        pending = _PendingCopy(target, source, _checksum(source), threading.Event(), threading.Lock())
        with self._condition:
            self._pending.append(pending)
            self._condition.notify()

    def mark(self) -> _Ticket:
        with self._condition:
            return _Ticket(list(self._pending))

    def order(self) -> None:
        with self._condition:
            started = list(self._pending)
        for pending in started:
            pending.done.wait()

    def finish(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        if self._problems:
            raise AssertionError("\n".join(self._problems))

    def release(self) -> None:
        """Do nothing: no memory is cached."""

    def assert_filled_once(self) -> None:
        """Fail unless every element that was allocated arrived exactly once."""
        for counts in self._arrived.values():
            if not bool((counts == 1).all()):
                raise AssertionError(
                    f"{int((counts == 0).sum())} elements never arrived, {int((counts > 1).sum())} more than once"
                )

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._pending and not self._stopping:
                    self._condition.wait()
                if not self._pending:
                    return
                pending = self._random.choice(self._pending)
            time.sleep(self._random.random() / 2000)
            self._run(pending)
            with self._condition:
                self._pending.remove(pending)
            pending.done.set()

    def _run(self, pending: _PendingCopy) -> None:
        if _checksum(pending.source) != pending.checksum:
            self._problems.append("a staging buffer was overwritten before the copy from it was done")
        target = pending.target
        source = pending.source
        if source.elements.packing is not None:
            decode_packs(target, source.on_host(), source.elements.packing, source.elements.arithmetic)
        else:
            compute(target, source.on_host(), source.elements.arithmetic)
        counts = self._arrived.get(target.untyped_storage().data_ptr())
        if counts is not None:
            counts.as_strided(target.shape, target.stride(), target.storage_offset()).add_(1)


class _Ticket:
    def __init__(self, copies: list[_PendingCopy]) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.done.wait()
            copy.poison()


def _checksum(source: StridedBytes) -> int:
    return zlib.crc32(source.raw.numpy().tobytes())
