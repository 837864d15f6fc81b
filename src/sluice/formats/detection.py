"""Detection of the format of a source from its first bytes."""

from __future__ import annotations

from sluice._errors import CheckpointError, FormatError, TruncatedError
from sluice._options import TEXT_ENCODING
from sluice.formats.archives.tar import is_tar, refuse_tar
from sluice.formats.foreign import recognise, recognise_npz
from sluice.formats.protocol import Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.sources.protocol import Source

__all__ = ["FORMATS", "Format", "detect"]

#: The formats that sluice reads. Their first bytes exclude each other.
FORMATS: tuple[Format, ...] = (TorchZipFormat(), TorchLegacyFormat(), SafetensorsFormat())

#: Those whose files can hold text of Python 2, by their name.
_WITH_TEXT_OF_PYTHON_2 = {kind.name: kind for kind in (TorchZipFormat, TorchLegacyFormat)}

#: Bytes of the head that is examined: a tar header has 512, and JSON names its kind early.
_HEAD_BYTES = 4096

#: Smallest file of any format: a zip file has at least 22 bytes, a safetensors file 10.
_SMALLEST_BYTES = 10


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
    # An npz file is a zip file too; the first bytes of a pickle or gzip file can be a safetensors length.
    foreign = recognise_npz(head, source.path)
    if foreign is not None:
        raise foreign
    for candidate in FORMATS:
        if candidate.matches(head):
            with_text = _WITH_TEXT_OF_PYTHON_2.get(candidate.name) if encoding != TEXT_ENCODING else None
            return with_text(encoding=encoding) if with_text else candidate
    foreign = refuse_tar(source) if is_tar(head) else recognise(head, source.path)
    if foreign is not None:
        raise foreign
    problem = "not a recognized checkpoint format"
    expected, advice = "a torch.save or safetensors file", CheckpointError.advice
    error = FormatError(problem, file=source.path, offset=0, expected=expected, found=head[:16], advice=advice)
    error.foreign = True
    raise error
