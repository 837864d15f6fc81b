"""What the bytes of a source mean: one module for each format, and ``detect``, which tells them apart."""

from __future__ import annotations

from sluice._errors import FormatError, TruncatedError
from sluice.formats.archives.tar import is_tar, refuse_tar
from sluice.formats.foreign import recognise, recognise_npz
from sluice.formats.protocol import Format
from sluice.formats.safetensors.reader import Safetensors
from sluice.formats.torch_save.legacy import Legacy
from sluice.formats.torch_save.zip import TorchZip
from sluice.sources.protocol import Source

__all__ = ["FORMATS", "Format", "detect"]

#: The formats that sluice reads. Their first bytes exclude each other.
FORMATS: tuple[Format, ...] = (TorchZip(), Legacy(), Safetensors())

#: Bytes that are looked at: a tar header is 512, a line of JSON that names its kind comes early.
_HEAD_BYTES = 4096

#: A shorter file is none of the formats: a zip file has 22 bytes at least, a safetensors file 10.
_SMALLEST_BYTES = 10


def detect(source: Source) -> Format:
    """Return the format that the first bytes of a source claim; nothing else is read.

    Args:
        source: An open source.

    Raises:
        TruncatedError: It is too short to be any format.
        UnsupportedError: It is of a kind that sluice recognises but does not read; the message names it.
        IncompleteCheckpointError: It stands for a file that was never downloaded in full.
        FormatError: It is none of these.

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
            return candidate
    foreign = refuse_tar(source) if is_tar(head) else recognise(head, source.path)
    if foreign is not None:
        raise foreign
    problem = "this is no checkpoint that sluice knows"
    raise FormatError(problem, file=source.path, offset=0, expected="a torch.save or safetensors file", found=head[:16])
