"""Detection of the format of a source from its first bytes."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from sluice._errors import CheckpointError, FormatError, TruncatedError
from sluice._options import TEXT_ENCODING
from sluice.formats.archives.tar import is_tar, refuse_tar
from sluice.formats.first_bytes import is_gguf, is_safetensors, is_torch_legacy, is_torch_zip
from sluice.formats.protocol import Format
from sluice.sources.protocol import Source

__all__ = ["FORMATS", "Format", "KnownFormat", "detect"]

#: Bytes of the head that is examined: a tar header has 512, and JSON names its kind early.
_HEAD_BYTES = 4096

#: Smallest file of any format: a zip file has at least 22 bytes, a safetensors file 10.
_SMALLEST_BYTES = 10


class KnownFormat(Struct, frozen=True, kw_only=True):
    """A format that sluice reads, and how to import it."""

    #: Its name, as in ``Format``.
    name: str
    #: Whether the first bytes of a file, up to 4096, indicate it.
    matches: Callable[[bytes], bool]
    #: Returns the format for an encoding of text that Python 2 wrote. Imports it, because most files need only one.
    load: Callable[[str], Format]


def _torch_zip(encoding: str) -> Format:
    from sluice.formats.torch_save.zip_format import TorchZipFormat

    return TorchZipFormat(encoding=encoding)


def _torch_legacy(encoding: str) -> Format:
    from sluice.formats.torch_save.legacy_format import TorchLegacyFormat

    return TorchLegacyFormat(encoding=encoding)


def _safetensors(encoding: str) -> Format:  # noqa: ARG001  all its text is UTF-8
    from sluice.formats.safetensors.reader import SafetensorsFormat

    return SafetensorsFormat()


def _gguf(encoding: str) -> Format:  # noqa: ARG001  all its text is UTF-8
    from sluice.formats.gguf.reader import GgufFormat

    return GgufFormat()


#: The formats that sluice reads. Their first bytes exclude each other.
FORMATS = (
    KnownFormat(name="torch-zip", matches=is_torch_zip, load=_torch_zip),
    KnownFormat(name="torch-legacy", matches=is_torch_legacy, load=_torch_legacy),
    KnownFormat(name="safetensors", matches=is_safetensors, load=_safetensors),
    KnownFormat(name="gguf", matches=is_gguf, load=_gguf),
)


def detect(source: Source, *, encoding: str = TEXT_ENCODING) -> Format:
    """Return the format that the first bytes of a source indicate; nothing else is read.

    Args:
        source: An open source.
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
    size = source.identity.nbytes
    head = source.read_at(0, min(_HEAD_BYTES, size))
    if size < _SMALLEST_BYTES:
        problem = "the file is too short to be a checkpoint"
        raise TruncatedError(problem, file=source.path, expected=f"at least {_SMALLEST_BYTES} bytes", found=head)
    if is_torch_zip(head) and b".npy" in head:  # an npz file is a zip file too
        _refuse_npz(head, source.path)
    # The first bytes of a pickle or gzip file can be a safetensors length: formats are tried before other kinds.
    for known in FORMATS:
        if known.matches(head):
            return known.load(encoding)
    raise _foreign(source, head)


def _refuse_npz(head: bytes, path: str) -> None:
    from sluice.formats.foreign import recognise_npz

    error = recognise_npz(head, path)
    if error is not None:
        raise error


def _foreign(source: Source, head: bytes) -> CheckpointError:
    """Return the error for a file that is of none of the formats."""
    from sluice.formats.foreign import recognise

    error = refuse_tar(source) if is_tar(head) else recognise(head, source.path)
    if error is not None:
        return error
    problem = "not a recognized checkpoint format"
    expected, advice = "a torch.save, safetensors or GGUF file", CheckpointError.advice
    unknown = FormatError(problem, file=source.path, offset=0, expected=expected, found=head[:16], advice=advice)
    unknown.foreign = True
    return unknown
