"""Fuzz targets: functions of bytes that either return or raise a ``CheckpointError``. None of them needs torch.

Any other exception is a finding, and so is an input that takes more than ``MAX_SECONDS``. The runner adds a memory
limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress

from sluice._errors import CheckpointError
from sluice._options import Limits
from sluice.formats.archives.tar import TarDirectory
from sluice.formats.archives.zip_directory import read_directory
from sluice.formats.archives.zip_records import locate_records
from sluice.formats.detection import detect
from sluice.formats.distributed.metadata import read_metadata
from sluice.formats.gguf.reader import GgufFormat
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.protocol import Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.shard_index import read_shard_index
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.tree_limits import check_object
from sluice.formats.torch_save.zip_format import TorchZipFormat
from support.sources import MemorySource

__all__ = ["MAX_SECONDS", "TARGETS", "run"]

#: Maximum processor time of one input, in seconds. Wall-clock time would also count other work of the machine.
MAX_SECONDS = 1.0

_LIMITS = Limits()


def safetensors_header(data: bytes) -> None:
    """Parse a safetensors file, unchanged and with a length field that matches the remaining bytes."""
    _index(SafetensorsFormat(), data)
    _index(SafetensorsFormat(), max(0, len(data) - 8).to_bytes(8, "little") + data[8:])


def gguf_header(data: bytes) -> None:
    """Parse a GGUF file."""
    _index(GgufFormat(), data)


def zip_directory(data: bytes) -> None:
    """Parse a zip archive: its central directory, all local headers, and then as a ``torch.save`` file."""
    source = MemorySource(data)
    with suppress(CheckpointError):
        directory = read_directory(source, _LIMITS)
        records = [directory.record(name) for name in directory.positions]
        locate_records(source, [record for record in records if record is not None])
    _index(TorchZipFormat(), data)


def pickle_program(data: bytes) -> None:
    """Run the pickle of a ``torch.save`` file."""
    allowlist = TorchAllowlist(_LIMITS, len(data))
    unpickler = Unpickler(data, allowlist, limits=_LIMITS, file="memory")
    with suppress(CheckpointError):
        check_object(unpickler.load(), unpickler, _LIMITS, "memory")


def legacy_file(data: bytes) -> None:
    """Parse a legacy ``torch.save`` file, and then with the format that ``detect`` returns."""
    _index(TorchLegacyFormat(), data)
    with suppress(CheckpointError):
        _index(detect(MemorySource(data)), data)


def shard_index(data: bytes) -> None:
    """Parse the JSON index of a sharded checkpoint."""
    with suppress(CheckpointError):
        read_shard_index(MemorySource(data), _LIMITS)


def dcp_metadata(data: bytes) -> None:
    """Parse the metadata of a torch.distributed.checkpoint directory."""
    with suppress(CheckpointError):
        read_metadata(MemorySource(data), _LIMITS)


def tar_archive(data: bytes) -> None:
    """Parse the headers of a tar archive, and open its members."""
    with suppress(CheckpointError):
        directory = TarDirectory(MemorySource(data), _LIMITS)
        for entry in directory.entries():
            with suppress(CheckpointError):
                directory.open(entry.name)


def _index(file_format: Format, data: bytes) -> None:
    with suppress(CheckpointError), closing(MemorySource(data)) as source:
        index = file_format.read_index(source, _LIMITS)
        file_format.locate(source, index, range(len(index.storages)))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        safetensors_header,
        gguf_header,
        zip_directory,
        pickle_program,
        legacy_file,
        shard_index,
        dcp_metadata,
        tar_archive,
    )
}


def run(name: str, data: bytes) -> None:
    """Run one target on an input.

    Raises:
        AssertionError: The target took longer than ``MAX_SECONDS``.
    """
    started = time.process_time()
    TARGETS[name](data)
    seconds = time.process_time() - started
    assert seconds <= MAX_SECONDS, f"{seconds:.2f} s for an input of {len(data)} bytes"


if __name__ == "__main__":
    print(*TARGETS)
