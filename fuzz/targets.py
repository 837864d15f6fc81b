"""What is fuzzed: functions of bytes that return, or raise an error of sluice's own tree. Nothing here needs torch.

Any other exception is a finding; so is an input that takes more than ``MOST_SECONDS``. The runner adds a limit on
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress

from sluice._errors import CheckpointError
from sluice._options import Limits
from sluice.formats.archives.zip_directory import read_directory
from sluice.formats.archives.zip_records import locate_records
from sluice.formats.detection import detect
from sluice.formats.distributed.metadata import read_metadata
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.protocol import Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.shard_index import parse_shard_index
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.pickled_object import check_object
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.testing import MemorySource

__all__ = ["MOST_SECONDS", "TARGETS", "run"]

#: Processor time of one input: seconds of wall-clock time would blame it for what else the machine does.
MOST_SECONDS = 1.0

_LIMITS = Limits()


def safetensors_header(data: bytes) -> None:
    """A whole safetensors file; its first eight bytes are set to the length of the rest, so that the rest is read."""
    _index(SafetensorsFormat(), data)
    _index(SafetensorsFormat(), max(0, len(data) - 8).to_bytes(8, "little") + data[8:])


def zip_directory(data: bytes) -> None:
    """A zip archive: its directory, all local headers, and as a file of torch."""
    source = MemorySource(data)
    with suppress(CheckpointError):
        directory = read_directory(source, _LIMITS)
        records = [directory.record(name) for name in directory.positions]
        locate_records(source, [record for record in records if record is not None])
    _index(TorchZipFormat(), data)


def pickle_program(data: bytes) -> None:
    """The pickle of a torch file."""
    objects = TorchAllowlist(_LIMITS, len(data))
    unpickler = Unpickler(data, objects, limits=_LIMITS, file="memory")
    with suppress(CheckpointError):
        check_object(unpickler.load(), unpickler, objects, _LIMITS, "memory")


def legacy_file(data: bytes) -> None:
    """A legacy file of torch, or whatever ``detect`` takes it for."""
    _index(TorchLegacyFormat(), data)
    with suppress(CheckpointError):
        _index(detect(MemorySource(data)), data)


def shard_index(data: bytes) -> None:
    """The JSON index of a sharded checkpoint."""
    with suppress(CheckpointError):
        parse_shard_index(data, "memory", _LIMITS)


def dcp_metadata(data: bytes) -> None:
    """The metadata of a torch.distributed.checkpoint directory."""
    with suppress(CheckpointError):
        read_metadata(MemorySource(data), _LIMITS)


def _index(one: Format, data: bytes) -> None:
    with suppress(CheckpointError), closing(MemorySource(data)) as source:
        index = one.read_index(source, _LIMITS)
        one.locate(source, index, range(len(index.storages)))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (safetensors_header, zip_directory, pickle_program, legacy_file, shard_index, dcp_metadata)
}


def run(name: str, data: bytes) -> None:
    """Give an input to a target.

    Raises:
        AssertionError: It took too long.
    """
    started = time.process_time()
    TARGETS[name](data)
    seconds = time.process_time() - started
    assert seconds <= MOST_SECONDS, f"{seconds:.2f} s for an input of {len(data)} bytes"


if __name__ == "__main__":
    print(*TARGETS)
