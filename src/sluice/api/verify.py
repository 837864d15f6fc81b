"""``sluice.verify``: check the bytes of a checkpoint against its checksums and a manifest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sluice._arguments import check_load, check_model, path_argument
from sluice._options import TEXT_ENCODING, Limits
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.checking.manifests import verify_model
from sluice.checking.verification import verify_checkpoint
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.formats.manifest import HashAlgorithm
from sluice.reports.verify import VerifyReport

if TYPE_CHECKING:
    from torch import nn

__all__ = ["verify"]


@public()
@explain_keywords
def verify(
    source: CheckpointSource | None = None,
    *,
    model: nn.Module | None = None,
    key: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    hashes: HashAlgorithm | None = None,
    nan: bool = False,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
) -> VerifyReport:
    """Read a checkpoint once and report what is damaged, with a fixed amount of memory.

    The checks are: the structure that opening checks; the CRC-32 of every record of zip files (including those inside
    torch.distributed.checkpoint files); a shard index against its shards; the indices of sparse tensors, as torch's
    ``check_invariants`` does; that every byte can be read; and with a manifest the dtype, shape and hash of each
    tensor, in any format.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``. None
            with ``model``.
        model: Instead of a source, a model whose live weights are compared with ``manifest``, by their names.
        key: Part whose tensors ``manifest``, ``hashes`` and ``nan`` are about, by their names in it; every byte of the
            files is read and checked in any case. None is the whole checkpoint or, if the manifest has none of its
            names, the state dict with some of them: ``run.pt`` is verified with the manifest of a file that was
            converted from its state dict. The report says which. With ``model``, the part of the manifest that has its
            names, chosen in the same way.
        manifest: A manifest that ``save``, ``convert`` or ``VerifyReport.write_manifest`` wrote.
        hashes: Hash every tensor with ``"sha256"`` or ``"xxh3_128"``. With ``manifest``, its algorithm is used instead.
        nan: Whether to count NaN and infinite elements of each tensor. They are not damage by themselves.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        The problems found; ``.ok`` is False if something is damaged, missing, unexpected or differs from the manifest.

    Raises:
        CheckpointError: The file does not exist, is unsafe, is not supported or exceeds a limit; or the manifest is not
            valid.
        MismatchError: ``key`` does not exist.
        ReadError: The file cannot be opened.
        SourceChangedError: The file changed during verification.
        TypeError: There is neither a source nor a model with a manifest, or a model with a source, ``hashes``, ``nan``
            or ``encoding``.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> sluice.verify("model.pth", hashes="sha256").write_manifest("pth.manifest.json")
        >>> sluice.verify("model.pth", manifest="pth.manifest.json").ok
        True
    """
    check_load(key=key, limits=limits, progress=progress)
    if model is not None:
        if source is not None or manifest is None or hashes is not None or nan or encoding != TEXT_ENCODING:
            raise TypeError("verify(model=, manifest=) needs a manifest, and takes no source, hashes, nan or encoding")
        check_model(model, source, "verify(model=, manifest=)")
        return verify_model(model, path_argument(manifest, "manifest"), key=key, limits=limits, progress=progress)
    if source is None:
        raise TypeError("verify(source) needs a checkpoint, or model= and manifest=")
    return verify_checkpoint(
        source,
        key=key,
        manifest=None if manifest is None else path_argument(manifest, "manifest"),
        hashes=hashes,
        nan=nan,
        limits=limits,
        encoding=encoding,
        progress=progress,
    )
