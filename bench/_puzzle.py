"""The puzzle of pytorch issue 75242: a half-precision model that fits the device, from a file that fits no memory.

Its author has a GPU of 24 GB, 32 GB of host memory and a checkpoint of 40 GB in fp32. Here the file is written without
ever holding it, the device is capped by torch's own allocator, and every weight is compared after the load.
"""

from __future__ import annotations

import os
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sluice.benchmark.gpt2 import random_weight
from sluice.benchmark.records import Work

__all__ = ["FULL", "Puzzle", "build", "choose", "make_file", "solve"]

#: Size of a local zip header before its name, and position of the lengths of its name and extra field, in bytes.
_LOCAL_HEADER, _NAME_AND_EXTRA = 30, struct.Struct("<26xHH")

#: Seconds of the puzzle in addition to moving the file's bytes: a process, its context, the comparison.
_EXTRA_SECONDS = 40.0

#: How often all bytes of the file move at about the speed of the disk: written, flushed, read, and a margin.
_HANDLINGS = 3

#: Smallest meaningful fraction of the full puzzle.
_SMALLEST_SHARE = 1 / 32

#: Fractions of free disk space and free device memory that the puzzle may take.
_SHARE_OF_FREE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A size of the puzzle."""

    #: Number of square matrices.
    layers: int
    #: Rows and columns of each.
    width: int = 8192

    @property
    def file_bytes(self) -> int:
        """Bytes of the weights in the file, in fp32."""
        return self.layers * self.width * self.width * 4

    @property
    def final_bytes(self) -> int:
        """F: bytes of the finished weights, in bf16."""
        return self.file_bytes // 2

    @property
    def device_limit_bytes(self) -> int:
        """Limit of torch's allocator, in bytes: 24 GiB at full scale, and in proportion at others."""
        return int((24 << 30) * self.file_bytes / FULL.file_bytes)

    @property
    def share(self) -> float:
        """Fraction of the full puzzle, from 0 to 1."""
        return self.file_bytes / FULL.file_bytes

    def build(self) -> nn.Sequential:
        """Build the model."""
        matrices = (nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers))
        return nn.Sequential(*(module for matrix in matrices for module in (matrix, nn.Tanh())))


#: 40 GB in fp32, 20 GB in half precision.
FULL = Puzzle(layers=149)


def build(layers: int, width: int) -> nn.Sequential:
    """Build the model of a puzzle; referenced as ``bench._puzzle:build``."""
    return Puzzle(layers=layers, width=width).build()


def choose(*, disk_bytes: int, device_bytes: int, seconds: float, bytes_per_second: float) -> Puzzle | None:
    """Return the largest puzzle that fits disk, device and time; None if it is too small to be meaningful.

    Args:
        disk_bytes: Free disk space.
        device_bytes: Free memory of the device.
        seconds: Remaining time.
        bytes_per_second: Speed of writing a checkpoint.
    """
    share = min(
        1.0,
        _SHARE_OF_FREE * disk_bytes / FULL.file_bytes,
        _SHARE_OF_FREE * device_bytes / FULL.device_limit_bytes,
        (seconds - _EXTRA_SECONDS) * bytes_per_second / (_HANDLINGS * FULL.file_bytes),
    )
    return Puzzle(layers=int(share * FULL.layers)) if share >= _SMALLEST_SHARE else None


def make_file(path: Path, puzzle: Puzzle, *, threads: int) -> None:
    """Write the checkpoint in the layout of ``torch.save``, with at most one matrix per thread in memory."""
    with FakeTensorMode():
        model = puzzle.build()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(model.state_dict(), path)
    names = list(model.state_dict())
    shape = torch.Size([puzzle.width, puzzle.width])
    descriptor = os.open(path, os.O_WRONLY)

    def write(number: int, offset: int) -> None:
        weight = random_weight(names[number], shape)
        content = memoryview(weight.numpy().data).cast("B")
        while content:
            written = os.pwrite(descriptor, content, offset)
            content, offset = content[written:], offset + written

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(write, range(puzzle.layers), _storage_offsets(path)):
                pass
    finally:
        os.close(descriptor)


def _storage_offsets(path: Path) -> list[int]:
    """Return the offset of each storage in bytes, in the order of their tensors."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        records = {
            int(Path(info.filename).name): info
            for info in archive.infolist()
            if Path(info.filename).parent.name == "data"
        }
        offsets = []
        for number in range(len(records)):
            start = records[number].header_offset
            stream.seek(start)
            name, extra = _NAME_AND_EXTRA.unpack(stream.read(_LOCAL_HEADER))
            offsets.append(start + _LOCAL_HEADER + name + extra)
    return offsets


def solve(path: str, layers: int, width: int, device: str) -> Work:
    """Load the file into a model on the device with sluice, under the limit: the work of a process.

    Returns:
        Bytes read, peaks of the device in bytes, the number of wrong matrices, and whether the model computes.
    """
    import sluice

    puzzle = Puzzle(layers=layers, width=width)
    if device == "cuda":
        torch.ones(1, device=device).to(torch.bfloat16)  # creates the context, which does not belong to the load
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, puzzle.device_limit_bytes / total))
        torch.cuda.reset_peak_memory_stats()
    yield
    with sluice.empty_init():
        model = puzzle.build()
    yield
    report = sluice.load_into(model, path, device=device, dtype=torch.bfloat16)
    yield
    on_device = device == "cuda"
    peaks = {
        "device_allocated_bytes": torch.cuda.max_memory_allocated() if on_device else 0,
        "device_reserved_bytes": torch.cuda.max_memory_reserved() if on_device else 0,
    }
    with torch.no_grad():
        out = model(torch.ones(1, puzzle.width, dtype=torch.bfloat16, device=device))
    right = {"wrong_matrices": _wrong_matrices(model), "computes": bool(out.isfinite().all())}
    return {**peaks, **right, "read_bytes": report.read_bytes}


def _wrong_matrices(model: nn.Module) -> int:
    """Compare every matrix with the random numbers of the file; return the number of different matrices."""

    def is_wrong(item: tuple[str, torch.Tensor]) -> bool:
        name, weight = item
        return not torch.equal(weight, random_weight(name, weight.shape).to(weight.dtype).to(weight.device))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return sum(pool.map(is_wrong, model.state_dict().items()))
