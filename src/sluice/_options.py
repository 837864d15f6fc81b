"""Options that users set, and their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from sluice._public import public
from sluice._units import parse_bytes

if TYPE_CHECKING:
    from sluice.records import MachineFacts

__all__ = ["Limits", "LoadPlace", "Memory", "MemoryLimits", "PageCache", "Place", "Share", "TransferOptions"]

#: ``auto``: direct reads of ranges that are not cached, buffered reads of the rest. ``keep``: buffered reads only, so
#: that the file is cached for the next load. ``bypass``: direct reads; pages of unavoidable buffered reads are dropped.
PageCache = Literal["auto", "keep", "bypass"]

#: ``copy``: every tensor gets its own memory. ``map``: CPU tensors that need no change are mapped pages of the file.
Place = Literal["copy", "map"]

#: Places of a load into a module. ``shared``: pages of a finished copy for all processes of the host.
LoadPlace = Literal["copy", "map", "shared"]

#: Bytes that several ranks of a load need: each rank reads for itself.
Share = Literal["auto", "none"]

#: Default encoding of the text in files from Python 2, which do not declare it; torch.load has the same.
TEXT_ENCODING = "utf-8"

#: In place of an encoding: keep that text as bytes, as ``torch.load(encoding="bytes")`` does.
BYTES_ENCODING = "bytes"


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what a file may declare, checked before memory or time is spent on it.

    The defaults are far above the needs of real checkpoints. Raise a bound by name if you trust the file.

    Example:
        >>> Limits(entries=5_000_000).entries
        5000000
    """

    #: Tensors and zip records in one checkpoint. The largest models have under 200,000; a million takes 10 s.
    entries: int = 500_000
    #: Files in one checkpoint, one per shard or parameter. Examining this many takes about a second.
    files: int = 100_000
    #: Depth of nested containers. Real training states are about 10 deep.
    depth: int = 64
    #: Opcodes of one pickle, each of which builds at most one object; a tensor takes about 30.
    nodes: int = 16_000_000
    #: Repeated occurrences of values in containers that occur more than once. An occurrence counts once, plus once per
    #: 64 characters of its dotted name. One kilobyte can describe 2**40 occurrences; listing the default number takes
    #: about 64 MiB. An optimizer whose groups share their ``betas`` has three per group.
    repeats: int = 250_000
    #: Bytes of one header: a safetensors header, data.pkl or a zip central directory. safetensors has the same limit.
    header_bytes: int = 100_000_000
    #: Bytes of one tensor or record name. torch has no limit; the dotted names of a checkpoint together have at most
    #: ``header_bytes`` characters.
    name_bytes: int = 1 << 20
    #: Dimensions of a tensor; torch itself allows 64.
    dimensions: int = 64
    #: Bytes that a conversion may write in excess of the bytes of the file, for expanded or overlapping tensors. A file
    #: of a few hundred bytes can describe a tensor of a terabyte.
    repeated_bytes: int = 16 << 30
    #: Whether files of a checkpoint directory may be symbolic links to files outside it, as in Hugging Face snapshots.
    symlinks_outside: bool = True

    def __post_init__(self) -> None:
        if wrong := [name for name in self.__slots__[:-1] if not isinstance(getattr(self, name), Real)]:
            raise TypeError(f"Limits(...) with what is not a number: {', '.join(wrong)}")


#: The default bounds.
DEFAULT_LIMITS = Limits()


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits on the growth of memory during a call.

    A size is a number of bytes or a text: ``"2GiB"`` and ``"2G"`` are 2 * 1024**3 bytes, ``"2GB"`` is 2 * 1000**3.

    Raises:
        ValueError: A text is not a size, or a size is negative.
        TypeError: A size is neither an int nor a text.

    Example:
        >>> MemoryLimits(host="4GiB", staging="32MiB").staging
        '32MiB'
    """

    #: Growth of host memory, all kinds together; None for the limit of the control group or the free memory.
    host: int | str | None = None
    #: Growth of the reserved memory of each accelerator: one size for all, or one size per device name.
    device: int | str | Mapping[str, int | str] | None = None
    #: Total size of the reusable host buffers. 64 MiB serves 8 readers of 8 MiB, which saturated the measured disks.
    staging: int | str = "64MiB"

    def __post_init__(self) -> None:
        _check_size("staging", self.staging)
        sizes = {"host": self.host}
        if isinstance(self.device, Mapping):
            sizes.update({f"device[{name!r}]": size for name, size in self.device.items()})
        else:
            sizes["device"] = self.device
        for name, size in sizes.items():
            if size is not None:
                _check_size(name, size)


def _check_size(name: str, size: int | str) -> None:
    try:
        parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"MemoryLimits({name}=...): {error}") from None


#: The limits without ``memory=``.
NO_LIMITS = MemoryLimits()

#: Type of every ``memory=`` argument: limits, or one size for the growth of host memory.
Memory: TypeAlias = MemoryLimits | int | str | None


class TransferOptions(Struct, frozen=True, kw_only=True):
    """Options of a transfer that the public functions pass on unchanged."""

    #: Limits on the growth of memory; None for the defaults.
    memory: MemoryLimits | None = None
    #: Use of the page cache.
    page_cache: PageCache = "auto"
    #: Whether tensors are copied or may be mapped pages of the files.
    place: Place = "copy"
    #: Processes of this host that load at the same time and share staging and the limits of host memory; 0 if it is not
    #: known: one, or for a model of DTensors what its launcher says.
    host_ranks: int = 0
    #: Facts of the machine and of all files, if several transfers are planned at once; None to collect them.
    facts: MachineFacts | None = None
