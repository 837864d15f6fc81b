"""``sluice.convert``: write a checkpoint in another format, dtype or naming."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sluice._dtypes import dtype_name, why_no_cast
from sluice._errors import MismatchError, UnsupportedError
from sluice._options import Limits, MemoryLimits, PageCache
from sluice._progress import Progress
from sluice._public import public
from sluice._units import parse_bytes
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.converting.contents import flat_contents, whole_contents
from sluice.converting.conversion import Conversion, Written
from sluice.converting.destination import check_destination
from sluice.converting.tensor_files import convert_to_directory, convert_to_safetensors
from sluice.converting.torch_files import convert_to_parameters, convert_to_torch
from sluice.entries.rules import Rule
from sluice.entries.tree import every_entry, walk
from sluice.formats.manifest import HashAlgorithm
from sluice.matching.renaming import Rename
from sluice.reports.save import SaveReport
from sluice.writing.manifest import manifest_writer
from sluice.writing.save_formats import SaveFormat, choose_format

__all__ = ["convert"]


@public()
def convert(
    source: CheckpointSource,
    destination: str | os.PathLike[str],
    *,
    key: str | None = None,
    format: SaveFormat | None = None,  # noqa: A002  (the name that every library has for it)
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    max_shard_size: int | str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    manifest_hash: HashAlgorithm = "sha256",
    overwrite: bool = False,
    progress: Progress = False,
    memory: MemoryLimits | None = None,
    limits: Limits | None = None,
    page_cache: PageCache = "auto",
    dry_run: bool = False,
) -> SaveReport:
    """Write a checkpoint in another format, dtype or naming, with a fixed amount of memory.

    Bytes go from the source through the staging buffers to the new file; data that is not changed never becomes a
    tensor. Host memory grows by at most the staging buffers, 1 KiB per tensor and 32 MiB. The new file is written next
    to its final name, synced and renamed, as by ``save``.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        destination: A file or a directory. It may be the source, if that is a single file or a Hugging Face model.
        key: Part of the checkpoint, as in ``load_into``. None takes the whole object if the format can hold it
            (``"torch"``), and otherwise the only state dict in it; the report lists what was left out.
        format: As in ``save``. ``"torch"`` keeps nested objects, plain values, Parameters and shared storages; the
            others hold tensors by name.
        dtype: Dtype that real floating-point tensors are cast to; None keeps each dtype.
        rename: New names, as in ``load_into``.
        rules: Rules that transform tensors, by their new names; see ``sluice.rules``. With ``rename`` or ``rules``, a
            torch file holds a flat state dict.
        max_shard_size: Bytes of tensors in one shard, such as ``"5GB"``; only for ``"huggingface"``.
        manifest: File for the hash, dtype and shape of each tensor, as in ``save``.
        manifest_hash: ``"sha256"``, or ``"xxh3_128"``, which is faster and only finds damage.
        overwrite: Whether existing files may be replaced, including the manifest.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        memory: Limit on the growth of host memory, and the size of the staging buffers (at least 2 MiB).
        limits: Bounds for hostile files.
        page_cache: How the source is read, as in ``load_into``.
        dry_run: Write nothing; the report lists what would be written.

    Returns:
        The files that were written and their sizes, casts, ties, and what was left out.

    Raises:
        CheckpointError: The source is damaged, unsafe or not supported, or has data that cannot be written.
        MismatchError: There is not exactly one state dict, or ``key``, ``rename`` or ``rules`` do not match it.
        BudgetError: The memory limits cannot be kept; nothing was read.
        SaveError: The format cannot hold the data, or the operating system failed; existing files are intact.
        ReadError: The operating system failed a read.
        SourceChangedError: The source changed during the conversion.
        ValueError: The format is unknown or contradicts the other arguments.
        ImportError: The hash needs a library that is not installed.

    Example:
        >>> report = sluice.convert("model.pth", "half.safetensors", dtype=torch.bfloat16)
        >>> report = sluice.convert("run.pt", "hf-model", key="model", max_shard_size="5GB")
    """
    started = time.perf_counter()
    path = Path(os.fsdecode(destination))
    chosen = choose_format(path, format, max_shard_size)
    with borrow(source, limits=limits) as checkpoint:
        check_destination(checkpoint, path, chosen)
        read = whole_contents if chosen == "torch" else flat_contents
        contents = read(checkpoint, key=key, rename=rename, rules=rules)
        conversion = Conversion(
            checkpoint=checkpoint,
            destination=path,
            dtype=None if dtype is None else dtype_name(dtype),
            limit_bytes=None if max_shard_size is None else parse_bytes(max_shard_size),
            overwrite=overwrite,
            progress=progress,
            memory=memory,
            page_cache=page_cache,
            manifest=None if dry_run else manifest_writer(manifest, manifest_hash, path, overwrite=overwrite),
            dry_run=dry_run,
        )
        _check(conversion, contents.tree, chosen)
        written = _WRITERS[chosen](conversion, contents.tree)
        if conversion.manifest:
            conversion.manifest.commit()
    return SaveReport(
        destination=str(path),
        format=chosen,
        files=tuple(str(file) for file in written.files),
        file_bytes=tuple(written.files.values()),
        replaced=written.replaced,
        tensors=written.tensors,
        nbytes=written.nbytes,
        seconds=time.perf_counter() - started,
        tied=written.tied,
        casts=written.casts,
        notes=(*checkpoint.index.notes, *contents.notes),
        dry_run=dry_run,
    )


def _check(conversion: Conversion, tree: object, chosen: str) -> None:
    """Refuse data that the format cannot hold, before anything is written."""
    names = {id(entry): name for name, entry in walk(tree)}
    for entry in every_entry(tree):
        name = names.get(id(entry), "_metadata")
        if entry.composite is not None and (conversion.manifest or chosen not in _TORCH_FILES):
            where = "a manifest has no hash for it" if chosen in _TORCH_FILES else f"{chosen} files hold dense tensors"
            raise UnsupportedError(
                f"a {entry.layout} tensor cannot be written: {where}", file=conversion.checkpoint.path, tensor=name
            )
        why = why_no_cast(entry.dtype, conversion.finished(entry), requires_grad=entry.requires_grad)
        if why:
            raise MismatchError(why, file=conversion.checkpoint.path, tensor=name)


#: Formats whose files are pickles, which can describe sparse and quantized tensors.
_TORCH_FILES = frozenset({"torch", "per-parameter"})

_WRITERS: dict[str, Callable[[Conversion, object], Written]] = {
    "torch": convert_to_torch,
    "safetensors": convert_to_safetensors,
    "huggingface": convert_to_directory,
    "per-parameter": convert_to_parameters,
}
