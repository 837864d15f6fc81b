"""``sluice.save``: write a module, a state dict or a training state to disk."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from sluice._arguments import check_load, check_save, dtype_argument, path_argument, size_or_none, state_to_save
from sluice._dtypes import DType
from sluice._errors import SaveError
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.formats.manifest import HashAlgorithm
from sluice.modules.unloaded import is_partly_loaded
from sluice.reports.save import SaveReport
from sluice.sources.opening import UPLOAD_ADVICE, refuse_url
from sluice.sources.remote.location import Remote
from sluice.writing.contents import SaveJob
from sluice.writing.formats import write_contents
from sluice.writing.held_object import HeldObject
from sluice.writing.manifest import manifest_writer
from sluice.writing.save_formats import SAVE_FORMATS, SaveFormat, choose_format
from sluice.writing.uploads import Upload, upload_to

__all__ = ["save", "save_destination"]


@public()
@explain_keywords
def save(
    obj: nn.Module | torch.optim.Optimizer | Mapping[str, object],
    path: str | os.PathLike[str] | Remote,
    *,
    format: SaveFormat | None = None,  # noqa: A002  (the name that every library has for it)
    dtype: DType | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str | None] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    manifest_hash: HashAlgorithm = "sha256",
    overwrite: bool = False,
    progress: Progress = False,
) -> SaveReport:
    """Write weights to disk completely or not at all, with a fixed amount of additional memory.

    Tensors that are cast, strided or on an accelerator pass through one buffer; no tensor is copied as a whole. The
    file is written next to its final name, synced and renamed, so that a crash leaves the old file or the new one.

    If ``obj`` has DTensors, every rank of their device mesh calls this function with the same arguments. Each writes
    the bytes that it holds; no tensor is gathered. Plain tensors and other values have to be the same on all ranks. The
    files are put in place once, for all ranks, or not at all. Not with ``manifest`` or ``"torch"``.

    Args:
        obj: A module or an optimizer (its ``state_dict()`` is saved), a state dict, or a nested training state.
        path: A file or a directory. It may be the file that the weights were loaded from. The address of an object
            store (``s3://``, ``gs://``, ``az://``), or a ``Remote`` with such an address and settings, gets the bytes
            while they are made, in uploads of several parts; no object is visible before it is complete.
        format: ``"torch"`` (``torch.load(weights_only=True)`` reads it), ``"safetensors"``, ``"huggingface"`` (a
            directory with ``model.safetensors``, or shards and an index) or ``"dcp"`` (a directory that
            ``torch.distributed.checkpoint`` reads). None chooses by the suffix: ``.safetensors``; ``.pt``, ``.pth``,
            ``.bin`` and ``.ckpt`` are torch; without a suffix, or with ``max_shard_size``, a Hugging Face directory.
        dtype: Dtype that real floating-point tensors are cast to, as a ``torch.dtype`` or a name such as ``"bf16"``;
            None keeps each dtype.
        max_shard_size: Bytes of tensors in one shard, such as ``"5GB"`` (5 * 1000**3); only for ``"huggingface"``.
        metadata: Text for the headers of safetensors files, such as ``checkpoint.metadata``. ``"format": "pt"`` is
            added; ``{"format": None}`` leaves it out. A torch file has no header; put such text into ``obj``.
        manifest: File for the hash, dtype and shape of each tensor, for ``verify``. Tensors are hashed while they are
            written; the manifest is put in place after the data.
        manifest_hash: ``"sha256"``, or ``"xxh3_128"``, which is faster and only finds damage.
        overwrite: Whether existing files may be replaced, including the manifest.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        The files that were written, with their sizes, and the time it took.

    Raises:
        SaveError: The format cannot hold ``obj``, a failed load has changed weights of the module, or the operating
            system failed; existing files are intact.
        UnsupportedError: ``path`` is a URL that is not that of an object store, or obstore is not installed.
        RankError: The save failed on a rank; raised on every rank.
        ValueError: The format is unknown or contradicts the other arguments, or an argument has none of its accepted
            values.
        TypeError: An argument has a wrong type, such as a file object for the path.
        ImportError: ``manifest_hash`` needs a library that is not installed.

    Example:
        >>> report = sluice.save(model, "half.safetensors", dtype=torch.bfloat16, manifest="model.manifest.json")
    """
    started = time.perf_counter()
    state = state_to_save(obj, path)
    refusal = None
    if isinstance(obj, nn.Module) and is_partly_loaded(obj):
        refusal = SaveError("a failed load has changed weights of the model", advice="Load it again, or restore them.")
    check_load(progress=progress, overwrite=overwrite)
    destination = save_destination(path)
    chosen = choose_format(Path(destination.name), format, max_shard_size, SAVE_FORMATS)
    check_save(metadata, chosen)
    by_ranks = _is_divided(state, chosen)
    if refusal is not None and not by_ranks:
        raise refusal
    if by_ranks and isinstance(destination, Upload):
        advice = "Save to a file system that all ranks share, and copy the files."
        raise SaveError("ranks cannot save together to an object store", file=destination.url, advice=advice)
    default, described = {"format": "pt"}, dict[str, str]()
    if "torchao" in sys.modules and chosen in {"safetensors", "huggingface"}:  # otherwise nothing is quantized by it
        state, described = _flattened(state, dtype)
    manifest_path = None if manifest is None else refuse_url(path_argument(manifest, "manifest"), advice=UPLOAD_ADVICE)
    job = SaveJob(
        destination=destination,
        dtype=dtype_argument(dtype, auto_is_none=True),
        limit_bytes=size_or_none("max_shard_size", max_shard_size),
        metadata={key: text for key, text in {**default, **described, **(metadata or {})}.items() if text is not None},
        overwrite=overwrite,
        manifest=manifest_writer(manifest_path, manifest_hash, str(destination), overwrite=overwrite),
        progress=progress,
    )
    with destination if isinstance(destination, Upload) else nullcontext():
        if by_ranks:
            from sluice.writing.ranks.save import save_by_ranks

            saved = save_by_ranks(state, chosen, job, refusal)
        else:
            saved = write_contents(HeldObject(state, job.dtype), chosen, job)
    count = saved.tensors
    return SaveReport.of(saved, started=started, destination=str(destination), format=chosen, taken=count, total=count)


def save_destination(path: str | os.PathLike[str] | Remote, name: str = "path") -> Path | Upload:
    """Return the destination of a save or a conversion.

    Args:
        path: The argument.
        name: Its name.

    Raises:
        UnsupportedError: It is an address that is not that of an object store, or obstore is not installed.
        TypeError, ValueError: It is neither a path nor a ``Remote``, or it is empty.
    """
    if isinstance(path, Remote) or (isinstance(path, str) and "://" in path):
        upload = upload_to(path)
        if upload is not None:
            return upload
    if path == "":
        raise ValueError(f"{name} is empty; write '.' for the current directory")
    return Path(refuse_url(path_argument(path, name), advice=UPLOAD_ADVICE))


def _is_divided(state: object, save_format: SaveFormat) -> bool:
    """Return whether ranks save together: each has a part of the state or, with ``"dcp"``, a file."""
    if save_format != "dcp" and "torch.distributed.tensor" not in sys.modules:  # then there is no DTensor
        return False
    from sluice.writing.ranks.division import dtensors_in

    return save_format == "dcp" or bool(dtensors_in(state))


def _flattened(state: object, dtype: DType | None) -> tuple[object, dict[str, str]]:
    """Return a state whose quantized weights are plain tensors in the layout of torchao, and what describes them."""
    from sluice.quantizing.saved import flattened

    found = flattened(state) if isinstance(state, Mapping) else None
    if found is None:
        return state, {}
    if dtype is not None:
        raise SaveError("dtype= would cast the scales of quantized weights", found=str(dtype), advice="Leave it out.")
    return found
