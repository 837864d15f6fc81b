"""Consumers of verified data: checksums of records, and hashes, counts and indices of tensors."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import TypeAlias

import torch
from msgspec import Struct, field

from sluice.formats.manifest import Hasher
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Quantized
from sluice.reports.verify import VerifyProblem

__all__ = ["Consumer", "NonFiniteCounter", "RecordChecksum", "TensorCheck"]

#: Elements that are tested together, so that temporary tensors stay in the cache of a processor.
_BLOCK_ELEMENTS = 1 << 17

#: Receives elements or bytes in order: the next ones, as a flat tensor on the host.
Consumer: TypeAlias = Callable[[torch.Tensor], None]


class RecordChecksum(Struct, eq=False):
    """The CRC-32 of a record, computed and recorded."""

    #: Position of the file.
    file: int
    #: Checksum recorded in the file, and the range that it covers.
    checksum: Checksum
    #: CRC-32 of the bytes so far.
    value: int = 0
    #: Whether some could not be read.
    failed: bool = False

    @property
    def range(self) -> tuple[int, int, int]:
        """File, first byte and one past the last byte."""
        return self.file, self.checksum.offset, self.checksum.offset + self.checksum.nbytes

    def fail(self) -> None:
        """Note that some bytes could not be read."""
        self.failed = True

    def problem(self, path: str) -> VerifyProblem:
        """Return the difference of the two, in the file at a path."""
        recorded = self.checksum
        return VerifyProblem(
            kind="checksum",
            problem=f"the CRC-32 of record {recorded.name!r} differs",
            file=path,
            offset=recorded.offset,
            expected=f"{recorded.crc:#010x}",
            found=f"{self.value:#010x}",
        )

    def update(self, data: torch.Tensor) -> None:
        """Receive the next bytes."""
        self.value = zlib.crc32(_bytes_of(data), self.value)


class NonFiniteCounter(Struct, eq=False):
    """Counts elements that are NaN or infinite. A complex element counts for either part, and can count as both."""

    nan: int = 0
    inf: int = 0

    @staticmethod
    def counts(dtype: str) -> bool:
        """Return whether elements of a dtype can be NaN or infinite."""
        return dtype.startswith(("float", "bfloat", "complex")) and not dtype.startswith("float4")

    def update(self, data: torch.Tensor) -> None:
        """Receive the next elements."""
        for first in range(0, len(data), _BLOCK_ELEMENTS):
            block = data[first : first + _BLOCK_ELEMENTS]
            numbers = torch.view_as_real(block) if block.is_complex() else block.unsqueeze(-1)
            numbers = numbers.float() if numbers.itemsize == 1 else numbers  # torch has no tests of one-byte dtypes
            if not numbers.isfinite().all():
                self.nan += int(numbers.isnan().any(-1).sum())
                self.inf += int(numbers.isinf().any(-1).sum())


class TensorCheck(Struct, eq=False):
    """The hash and the counts of one tensor, under all its names."""

    #: The tensor.
    entry: Entry
    #: Its names.
    names: list[str] = field(default_factory=list)
    #: Hash of its elements; None if not requested.
    hasher: Hasher | None = None
    #: Counter of its non-finite elements; None if not requested.
    counter: NonFiniteCounter | None = None
    #: The record whose bytes its elements are; None if the record is read apart.
    record: RecordChecksum | None = None
    #: Whether some elements could not be read.
    failed: bool = False

    def consumers(self, component: Entry) -> list[Consumer]:
        """Return the consumers of one dense component; the tensor itself if it is dense."""
        composite = self.entry.composite
        counted = composite is None or component is composite.values
        found: list[Consumer] = [] if self.hasher is None else [self.hash]
        found += [self.counter.update] if self.counter is not None and counted else []
        return [*found, self.record.update] if self.record is not None else found

    def hash(self, data: torch.Tensor) -> None:
        """Receive the next elements."""
        assert self.hasher is not None
        self.hasher.update(_bytes_of(data))

    def fail(self) -> None:
        """Note that some elements could not be read."""
        self.failed = True
        if self.record is not None:
            self.record.failed = True

    def finish(self) -> None:
        """Hash the scales and zero points of a quantized tensor that are plain numbers."""
        composite = self.entry.composite
        if isinstance(composite, Quantized) and self.hasher:
            for numbers in (composite.scales, composite.zero_points):
                if isinstance(numbers, tuple):
                    self.hasher.update(struct.pack(f"<{len(numbers)}d", *numbers))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
