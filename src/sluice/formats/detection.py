"""Detection of the format of a source from its first bytes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from sluice._errors import CheckpointError, FormatError, TruncatedError, UnsupportedError
from sluice._options import TEXT_ENCODING
from sluice.formats.archives.tar import is_tar
from sluice.formats.first_bytes import is_gguf, is_safetensors, is_torch_legacy, is_torch_zip
from sluice.formats.foreign import recognise
from sluice.formats.protocol import Format
from sluice.sources.protocol import Source

__all__ = ["FORMATS", "Format", "Head", "KnownFormat", "detect"]

#: Bytes of the head that is examined: a tar header has 512, and JSON names its kind early.
_HEAD_BYTES = 4096

#: Smallest file of any format: a zip file has at least 22 bytes, a safetensors file 10.
_SMALLEST_BYTES = 10


class KnownFormat(NamedTuple):
    """A format that sluice reads. Its module is imported for the first such file: most programs need only one."""

    #: Its name, as in ``Format``.
    name: str
    #: Whether the first bytes of a file, up to 4096, indicate it.
    matches: Callable[[bytes], bool]
    #: Module and name of its class, below ``sluice.formats``.
    where: str
    #: Whether its files may hold text of Python 2, whose encoding the class takes.
    has_encoding: bool = False

    def load(self, encoding: str) -> Format:
        """Return the format for an encoding of text that Python 2 wrote."""
        module, _, name = self.where.rpartition(".")
        made: Format = getattr(import_module(f"sluice.formats.{module}"), name)(
            **{"encoding": encoding} if self.has_encoding else {}
        )
        return made


#: The formats that sluice reads. Their first bytes exclude each other.
FORMATS = (
    KnownFormat("torch-zip", is_torch_zip, "torch_save.zip_format.TorchZipFormat", has_encoding=True),
    KnownFormat("safetensors", is_safetensors, "safetensors.reader.SafetensorsFormat"),
    KnownFormat("torch-legacy", is_torch_legacy, "torch_save.legacy_format.TorchLegacyFormat", has_encoding=True),
    KnownFormat("gguf", is_gguf, "gguf.reader.GgufFormat"),
)


class Head(NamedTuple):
    """The beginning of a file, looked at once."""

    #: The source, through which headers are read.
    source: Source
    #: The bytes that are examined.
    data: bytes
    #: The format that they indicate; None for anything else.
    known: KnownFormat | None

    @classmethod
    def of(cls, source: Source) -> Head:
        """Look at an open source; nothing else of it is read."""
        data = source.read_at(0, min(_HEAD_BYTES, source.identity.nbytes))
        return cls(source, data, next((known for known in FORMATS if known.matches(data)), None))


def detect(source: Source | Head, *, encoding: str = TEXT_ENCODING) -> Format:
    """Return the format that the first bytes of a source indicate.

    Args:
        source: An open source, or its head.
        encoding: Encoding of text that Python 2 wrote, for the formats that can contain it.

    Raises:
        TruncatedError: It is too short for any format.
        UnsupportedError: It is of a kind that sluice recognizes but does not read; the message names it.
        IncompleteCheckpointError: It is a placeholder of a file that was not downloaded completely.
        FormatError: It is of an unknown kind.

    Example:
        >>> detect(LocalFile("model.safetensors")).name
        'safetensors'
    """
    head = source if isinstance(source, Head) else Head.of(source)
    if len(head.data) < _SMALLEST_BYTES:
        problem, least = "the file is too short to be a checkpoint", f"at least {_SMALLEST_BYTES} bytes"
        raise TruncatedError(problem, file=head.source.path, expected=least, found=head.data)
    # The first bytes of a pickle or gzip file can be a safetensors length: formats are tried before other kinds.
    if head.known is None:
        raise _foreign(head.source, head.data)
    return head.known.load(encoding)


def _foreign(source: Source, head: bytes) -> CheckpointError:
    """Return the error for a file that is of none of the formats."""
    error = recognise(head, source.path)
    if is_tar(head):
        error = UnsupportedError("this is a tar archive among other files, or inside one", file=source.path)
    if error is not None:
        return error
    problem = "not a recognized checkpoint format"
    expected, advice = "a torch.save, safetensors or GGUF file", CheckpointError.advice
    unknown = FormatError(problem, file=source.path, offset=0, expected=expected, found=head[:16], advice=advice)
    unknown.foreign = True
    return unknown
